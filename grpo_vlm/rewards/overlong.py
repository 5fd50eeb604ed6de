"""DAPO's soft overlong penalty (arXiv 2503.14476, equation 13), for the reward files that use it."""


def overlong_penalty(length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    """0 for a completion that leaves the buffer free, falling to -1 at the limit; -1 beyond it.

    All in tokens; the buffer is the last part of the limit. Raises ValueError for a buffer outside 1..limit.
    """
    if not 0 < overlong_buffer_length <= max_response_length:
        raise ValueError(
            f"overlong_buffer_length is {overlong_buffer_length}; it must be 1 to max_response_length "
            f"({max_response_length})"
        )
    free = max_response_length - overlong_buffer_length
    if length <= free:
        return 0.0
    return max(-1.0, (free - length) / overlong_buffer_length)
