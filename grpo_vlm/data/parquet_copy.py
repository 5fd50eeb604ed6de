"""Copies a parquet file into Arrow batches of about a megabyte, in a process of its own.

A reader must hold a whole page, compressed and not, and a writer puts up to 1,024 rows into one, however large: with
pictures that is a gigabyte for a moment, which the trainer's process would keep. This file is run by its path and
imports nothing of the package, so that the process is small.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 1024


def write_batches(path: Path, folder: Path, batch_bytes: int) -> None:
    """Writes rows.arrow, batches of about batch_bytes, and about.json with the columns and the rows of each batch."""
    sizes: list[int] = []
    # buffer_size: a column is read page by page and not as a whole
    with pq.ParquetFile(path, buffer_size=batch_bytes, pre_buffer=False) as file:
        columns = list(file.schema_arrow.names)
        schema = pa.schema([field.with_type(plain(field.type)) for field in file.schema_arrow])
        with pa.ipc.new_file(str(folder / "rows.arrow"), schema) as writer:
            for number in range(file.num_row_groups):
                about = file.metadata.row_group(number)
                count = batch_bytes * about.num_rows // max(about.total_byte_size, 1)
                count = max(1, min(count, BATCH_ROWS))
                for batch in file.iter_batches(count, row_groups=[number], use_threads=False):
                    writer.write_batch(batch.cast(schema))
                    sizes.append(batch.num_rows)
    (folder / "about.json").write_text(json.dumps({"columns": columns, "sizes": sizes}), encoding="utf-8")


def plain(kind: pa.DataType) -> pa.DataType:
    """Categories become their values: an Arrow file has one dictionary for all batches."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


if __name__ == "__main__":
    source, target, size = sys.argv[-3:]
    try:
        write_batches(Path(source), Path(target), int(size))
    except Exception as error:  # in one line for the process that asked
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
