"""The fields of `FinetuneConfig`: type, default and explanation of each. The command line makes its flags from them."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.validation import check_field
from ..config.config_fields import DATASETS, check_dataset_names, config_field


AMOUNTS = ("steps", "tokens", "minutes")
TOKENS = 500_000  # if no amount is given


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Settings of a fine-tune, see [`finetune`]. At most one of `steps`, `tokens` and `minutes` is given."""

    dataset: tuple[str, ...] = config_field(
        ("c4",),
        f"training text, of several datasets in equal parts or with shares, such as c4:0.8 chat.jsonl:0.2: {DATASETS}",
    )
    steps: int | None = config_field(
        None, "steps of the optimizer", unset="as many as tokens or minutes allow", least=1
    )
    tokens: int | None = config_field(
        None, "tokens to train on; text that holds fewer is repeated", unset=f"{TOKENS:,}", least=1
    )
    minutes: float | None = config_field(
        None,
        "approximate time to train; the number of steps is estimated first",
        unset="no limit",
        least=0,
        above=True,
    )
    seq_length: int = config_field(512, "tokens in each sequence", least=2)
    batch_size: int = config_field(8, "sequences in each step, of all processes together", least=1)
    micro_batch: int | None = config_field(
        None, "sequences in a forward pass; fewer need less memory", unset="the process's part of a step", least=1
    )
    kl_weight: float = config_field(
        1.0, "share of the teacher's predictions in the loss; the text itself has the rest", least=0, most=1
    )
    learning_rate: float | None = config_field(
        None,
        "largest learning rate, of a cosine schedule",
        unset="0.29 / hidden size, or 1.16 / hidden size with LoRA",
        least=0,
        above=True,
    )
    lora: int | None = config_field(
        None,
        "rank of LoRA on the projections but not on stacked experts; it is merged at the end",
        unset="all weights but the embeddings are trained",
        least=1,
        metavar="RANK",
    )
    seed: int = config_field(0, "seed of the order of the text", least=0)
    add_bos: bool | None = config_field(
        None, "begin every sequence with the tokenizer's BOS token", unset="yes for Gemma models, else no"
    )
    bf16: bool | None = config_field(
        None, "multiply in bfloat16; the weights stay in float32", unset="yes if that is faster on the device"
    )
    gradient_checkpointing: bool = config_field(False, "compute activations twice, to keep fewer in memory")

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_field(entry, getattr(self, entry.name))
        names = check_dataset_names(self.dataset, "Pass text in memory to finetune(..., dataset=...).")
        if not names:
            raise TypeError("dataset is empty: expected one or more names or paths.")
        object.__setattr__(self, "dataset", tuple(names))
        given = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: expected one of {', '.join(AMOUNTS)}.")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-serializable."""
        return asdict(self)
