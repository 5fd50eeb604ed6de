"""Make the demo's start model: a tiny Qwen2.5-VL that sees easy-VQA's pictures but hedges about its answer.

GRPO needs groups whose answers differ. A model that was merely trained to answer has lost its entropy and learns
nothing more; this one keeps it on purpose. It is trained in two stages on easy-VQA's train split:

1. see: all labels are right; the answer's form is `\\boxed{red}` (asked for) or `it is red` at even odds;
2. hedge: a short stage in which a share of the labels is replaced by a random answer of the same kind, so that the
   model spreads its probability although the right answer stays the likeliest.

Run (CUDA: minutes; CPU: an hour or more): pip install easy-vqa dashscope
    python -m grpo_vlm.demo.build --out grpo_vlm/demo/model
The pictures and questions come from the package easy-vqa (MIT), the byte-pair ranks from dashscope (Apache-2.0).

Shape suffixes: B batch, T tokens, P patches of a picture, D features of a patch, C channels, S picture side in pixels.
"""

import argparse
import base64
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

SHAPES = ["circle", "rectangle", "triangle"]
COLOURS = ["black", "gray", "red", "green", "blue", "yellow", "teal", "brown"]
YES_NO = ["no", "yes"]
KINDS = [SHAPES, COLOURS, YES_NO]
ANSWERS = [answer for kind in KINDS for answer in kind]
FORMS = ["\\boxed{%s}", "it is %s"]  # the first is the form that the prompt asks for
PROMPT = "<|im_start|>user\n<|vision_start|>%s<|vision_end|>%s Answer in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"

PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 14, 2, 2
MAX_PIXELS = 64 * (PATCH_SIZE * MERGE_SIZE) ** 2  # larger pictures are shrunk to at most 64 tokens
CONTEXT = 4096  # tokens
# Qwen's own order of its special ids; with the first ranks they make a vocabulary of 3,072 = 48 x 64.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
RANKS = 3072 - len(SPECIAL_TOKENS)
# Qwen2.5-VL's template without its default system prompt: a shorter prompt trains and generates faster.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model and lengths of the two stages; the defaults made the shipped model."""

    picture_side: int = 84  # pixels after resizing: a multiple of 28; 84 gives 3 x 3 image tokens
    vision_hidden: int = 64  # two or more heads of 32
    vision_layers: int = 3
    text_hidden: int = 128  # heads of 32, half as many for keys and values
    text_layers: int = 3
    text_intermediate: int = 320
    see_batch: int = 256
    see_steps: int = 3700
    see_lr: float = 2e-3
    hedge_batch: int = 32  # small, so that the stage also blurs what the model sees a little
    hedge_steps: int = 300
    hedge_lr: float = 1e-3
    wrong_labels: float = 0.6  # share of hedge labels drawn at random from the answer's kind
    asked_form: float = 0.5  # share of answers in the form that the prompt asks for

    @property
    def patch_side(self) -> int:
        """Patches along one side of the picture."""
        return self.picture_side // PATCH_SIZE

    @property
    def image_tokens(self) -> int:
        """Tokens that one picture takes in the prompt."""
        return (self.patch_side // MERGE_SIZE) ** 2


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name!r} is not installed; pip install easy-vqa dashscope")
    return Path(spec.origin).parent


def build_tokenizer(count: int = RANKS, chat_template: str = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """Qwen's byte-level BPE cut to its first `count` ranks, so that it reads any text but in shorter pieces."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    lines = (package_folder("dashscope") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    ranks = {token: rank for token, rank in ranks.items() if rank < count}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell(left), spell(right)) for left, right in pairs]
    vocabulary = {spell(token): rank for token, rank in ranks.items()} | {SPECIAL_TOKENS[0]: count}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = chat_template
    return tokenizer


def build_processor(recipe: Recipe) -> Qwen2_5_VLProcessor:
    """Processor that enlarges a small square picture to picture_side x picture_side."""
    size = {"shortest_edge": recipe.picture_side**2, "longest_edge": MAX_PIXELS}
    image_processor = Qwen2VLImageProcessor(size=size, patch_size=PATCH_SIZE)
    video_processor = Qwen2VLVideoProcessor(size=size, patch_size=PATCH_SIZE)
    return Qwen2_5_VLProcessor(image_processor, build_tokenizer(), video_processor, chat_template=CHAT_TEMPLATE)


def build_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Stock Qwen2.5-VL of the recipe's size with random weights in float32."""
    token_id = tokenizer.convert_tokens_to_ids
    pad, eos = token_id("<|endoftext|>"), token_id("<|im_end|>")
    heads = recipe.text_hidden // 32
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": recipe.text_hidden,
        "intermediate_size": recipe.text_intermediate,
        "num_hidden_layers": recipe.text_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": recipe.text_layers,
        "use_sliding_window": False,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": pad,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    vision = {
        "depth": recipe.vision_layers,
        "hidden_size": recipe.vision_hidden,
        "intermediate_size": 2 * recipe.vision_hidden,
        "num_heads": recipe.vision_hidden // 32,
        "out_hidden_size": recipe.text_hidden,
        "fullatt_block_indexes": list(range(recipe.vision_layers)),
        "window_size": 112,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "initializer_range": 0.05,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=pad, pad_token_id=pad, eos_token_id=[eos, pad], do_sample=True, temperature=1.0
    )
    return model


class Lessons:
    """One split of easy-VQA on the training device: resized pictures, questions, and every answer in every form."""

    def __init__(self, split: str, recipe: Recipe, processor: Qwen2_5_VLProcessor, device: str) -> None:
        folder = package_folder("easy_vqa") / "data" / split
        questions = json.loads((folder / "questions.json").read_text())
        questions = [(text[0].upper() + text[1:], answer, picture) for text, answer, picture in questions]
        tokenizer = processor.tokenizer
        self.recipe, self.device = recipe, device
        self.image_token_id = processor.image_token_id
        self._load_pictures(folder / "images", 1 + max(picture for *_, picture in questions), processor)

        # Rows sorted by answer, so that a batch can be drawn evenly from the 13 answers.
        questions.sort(key=lambda row: ANSWERS.index(row[1]))
        self.texts = sorted({text for text, *_ in questions})
        text_index = {text: i for i, text in enumerate(self.texts)}
        self.row_text = torch.tensor([text_index[text] for text, *_ in questions], device=device)
        self.row_answer = torch.tensor([ANSWERS.index(answer) for _, answer, _ in questions], device=device)
        self.row_picture = torch.tensor([picture for *_, picture in questions], device=device)
        self.answer_rows = torch.bincount(self.row_answer, minlength=len(ANSWERS))
        self.answer_start = self.answer_rows.cumsum(0) - self.answer_rows
        kind_of = {answer: kind for kind in KINDS for answer in kind}
        self.kind_start = torch.tensor([ANSWERS.index(kind_of[a][0]) for a in ANSWERS], device=device)
        self.kind_size = torch.tensor([len(kind_of[a]) for a in ANSWERS], device=device)

        pads = "<|image_pad|>" * recipe.image_tokens
        self.prompts = [tokenizer(PROMPT % (pads, text))["input_ids"] for text in self.texts]
        eos = tokenizer.eos_token_id
        answers = [[tokenizer(form % answer)["input_ids"] + [eos] for answer in ANSWERS] for form in FORMS]
        longest = max(map(len, self.prompts)) + max(len(ids) for form in answers for ids in form)
        shape = (len(self.texts), len(FORMS), len(ANSWERS), longest)
        tokens, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, -100)
        for t, prompt in enumerate(self.prompts):
            for f, form in enumerate(answers):
                for a, ids in enumerate(form):
                    tokens[t, f, a, : len(prompt) + len(ids)] = torch.tensor(prompt + ids)
                    labels[t, f, a, len(prompt) : len(prompt) + len(ids)] = torch.tensor(ids)
        self.tokens, self.labels = tokens.to(device), labels.to(device)

    def _load_pictures(self, folder: Path, count: int, processor: Qwen2_5_VLProcessor) -> None:
        """Resize as the processor does; find how far each shape may move before it leaves the picture."""
        images = processor.image_processor
        size = {"height": self.recipe.picture_side, "width": self.recipe.picture_side}
        opened = [Image.open(folder / f"{i}.png").convert("RGB").resize(tuple(size.values()), 3) for i in range(count)]
        flat = b"".join(picture.tobytes() for picture in opened)
        side = self.recipe.picture_side
        pictures = torch.frombuffer(bytearray(flat), dtype=torch.uint8).view(count, side, side, 3)
        border = torch.stack([pictures[:, 0, 0], pictures[:, 0, -1], pictures[:, -1, 0]]).median(0).values
        inside = (pictures.int() - border[:, None, None].int()).abs().amax(-1) > 2
        rows, columns = inside.any(2).int(), inside.any(1).int()
        room = [rows.argmax(1), rows.flip(1).argmax(1), columns.argmax(1), columns.flip(1).argmax(1)]
        self.room = torch.stack(room).to(self.device)  # free pixels above, below, left, right
        self.pictures = pictures.to(self.device)
        self.mean = 255 * torch.tensor(images.image_mean, device=self.device)
        self.std = 255 * torch.tensor(images.image_std, device=self.device)

    def patches(self, picture: torch.Tensor, augment: bool) -> torch.Tensor:
        """Processor's pixel values [B, P, D] of the pictures with these indices [B], mirrored and moved if augment."""
        side, grid = self.recipe.picture_side, self.recipe.patch_side // MERGE_SIZE
        ys = torch.arange(side, device=self.device).expand(len(picture), side)
        xs = ys
        if augment:
            above, below, left, right = self.room[:, picture]
            chance = torch.rand(3, len(picture), device=self.device)
            ys = (ys - ((above + below + 1) * chance[0] - above).floor().long()[:, None]) % side
            xs = (xs - ((left + right + 1) * chance[1] - left).floor().long()[:, None]) % side
            xs = torch.where(chance[2, :, None] < 0.5, xs, xs.flip(1))
        x = self.pictures[picture[:, None, None], ys[:, :, None], xs[:, None, :]]
        x = (x - self.mean) / self.std
        x = x.view(-1, grid, MERGE_SIZE, PATCH_SIZE, grid, MERGE_SIZE, PATCH_SIZE, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
        x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, TEMPORAL_PATCH_SIZE, -1, -1)
        return x.reshape(len(picture), self.recipe.patch_side**2, -1)

    def draw(self, size: int, wrong_labels: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random batch, even over the answers: patches [B, P, D], token ids [B, T], labels [B, T]."""
        chance = torch.rand(5, size, device=self.device)
        answer = (chance[0] * len(ANSWERS)).long()
        row = self.answer_start[answer] + (chance[1] * self.answer_rows[answer]).long()
        other = self.kind_start[answer] + (chance[2] * self.kind_size[answer]).long()
        label = torch.where(chance[3] < wrong_labels, other, answer)
        form = (chance[4] >= self.recipe.asked_form).long()
        text = self.row_text[row]
        patches = self.patches(self.row_picture[row], augment=True)
        return patches, self.tokens[text, form, label], self.labels[text, form, label]


class BatchedForward:
    """The model's forward pass for a batch whose prompts all begin with one picture of the same size.

    Stock Qwen2.5-VL attends to pictures one after the other; equal sizes allow one call for all, which is what makes
    training on thousands of pictures quick. Equal to the stock pass to rounding.
    """

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, lessons: Lessons) -> None:
        self.model, self.recipe = model, lessons.recipe
        tokens = lessons.tokens[:1, 0, 0]
        grid = torch.tensor([[1, self.recipe.patch_side, self.recipe.patch_side]], device=lessons.device)
        is_image = tokens == lessons.image_token_id
        self.first = int(is_image[0].int().argmax())
        self.positions = model.model.get_rope_index(tokens, is_image.int(), image_grid_thw=grid)[0]
        half, merge = torch.arange(self.recipe.patch_side // MERGE_SIZE), torch.arange(MERGE_SIZE)
        blocks = torch.cartesian_prod(half, half, merge, merge).to(lessons.device)  # patches come in 2 x 2 blocks
        places = MERGE_SIZE * blocks[:, :2] + blocks[:, 2:]  # row and column of each patch
        self.rotary = model.model.visual.rotary_pos_emb(model.lm_head.weight, places)

    def see(self, patches: torch.Tensor) -> torch.Tensor:
        """Picture embeddings [B, image tokens, hidden] of patches [B, P, D]."""
        tower = self.model.model.visual
        size, count, _ = patches.shape
        x = tower.patch_embed(patches.flatten(0, 1)).view(size, count, -1)
        for block in tower.blocks:
            qkv = block.attn.qkv(block.norm1(x)).view(size, count, 3, block.attn.num_heads, -1)
            query, key, value = qkv.unbind(2)
            query, key = apply_rotary_pos_emb_vision(query, key, *self.rotary)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value)))
            x = x + block.attn.proj(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        return tower.merger(x).view(size, self.recipe.image_tokens, -1)

    def __call__(self, patches: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, T, hidden]; padding may only stand on the right of tokens [B, T]."""
        text = self.model.model.language_model
        words = text.embed_tokens(tokens)
        end = self.first + self.recipe.image_tokens
        x = torch.cat([words[:, : self.first], self.see(patches), words[:, end:]], 1)
        positions = self.positions[:, :, : tokens.shape[1]].expand(-1, len(tokens), -1)
        return text(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state


def train(
    forward: BatchedForward, lessons: Lessons, *, steps: int, batch_size: int, lr: float, wrong_labels: float
) -> None:
    """Supervised steps with AdamW, a short warm-up and a linear decay to zero."""
    model = forward.model
    fused = lessons.device != "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)
    warm_up = min(200, max(1, steps // 10))
    started = time.monotonic()
    for step in range(steps):
        patches, tokens, labels = lessons.draw(batch_size, wrong_labels)
        hidden, target = forward(patches, tokens)[:, :-1], labels[:, 1:]
        chosen = target != -100
        loss = F.cross_entropy(model.lm_head(hidden[chosen]), target[chosen])
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warm_up, 1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def build(recipe: Recipe, device: str, seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """Train the start model in both stages; returns it with its processor."""
    torch.manual_seed(seed)
    processor = build_processor(recipe)
    model = build_model(recipe, processor.tokenizer).to(device)
    lessons = Lessons("train", recipe, processor, device)
    forward = BatchedForward(model, lessons)
    see = {"steps": recipe.see_steps, "batch_size": recipe.see_batch, "lr": recipe.see_lr}
    train(forward, lessons, **see, wrong_labels=0.0)
    torch.manual_seed(seed + 1)
    hedge = {"steps": recipe.hedge_steps, "batch_size": recipe.hedge_batch, "lr": recipe.hedge_lr}
    train(forward, lessons, **hedge, wrong_labels=recipe.wrong_labels)
    return model, processor


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description="Make the demo's start model from easy-VQA's train split.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its processor")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(accelerator or "cpu"), help="torch device")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--see-steps", type=int, default=Recipe.see_steps, help="steps of the first stage")
    parser.add_argument("--hedge-steps", type=int, default=Recipe.hedge_steps, help="steps of the second stage")
    arguments = parser.parse_args()
    recipe = Recipe(see_steps=arguments.see_steps, hedge_steps=arguments.hedge_steps)
    model, processor = build(recipe, arguments.device, arguments.seed)
    model.save_pretrained(arguments.out)
    processor.save_pretrained(arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
