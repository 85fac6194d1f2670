"""What a comparison is asked for, checked before a model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..config import NeuronALConfig
from ..config_aliases import as_json
from ..config_fields import ALIASES
from ..data.documents import check_dataset
from ..evaluation.tasks import check_tasks
from ..evaluation.test_sets import name_test_sets
from ..formats.codebooks import BITS
from ..registry import parse_method
from ..saliency import SALIENCIES
from ..system.processes import Processes
from ..topup import TOPUPS
from ..validation import check_several, check_texts


class Combination(NamedTuple):
    """What a prune is asked for.

    Args:
        sparsity (`float`): in [0, 1).
        saliency, topup (`str`): methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        value_bits (`int`, *optional*): to how many bits kept values are rounded; None: they are not.
    """

    sparsity: float
    saliency: str
    topup: str
    value_bits: int | None = None


@dataclass(frozen=True)
class Asked:
    """What a comparison is asked for, see [`compare`]; made by [`check_asked`].

    Args:
        configs (`dict`): combination, in the order asked for -> its [`NeuronALConfig`], or why there is none.
        dataset: calibration data.
        tests (`dict`): name -> test set.
        max_windows (`int`, *optional*): windows per test set.
        tasks (`list[str]`): zero-shot tasks; none if it is empty.
        limit (`int`, *optional*): questions of each task.
        include_path (`str` or `Path`, *optional*): folder of further tasks.
    """

    configs: dict[Combination, NeuronALConfig | str]
    dataset: Any
    tests: dict[str, Any]
    max_windows: int | None
    tasks: list[str]
    limit: int | None
    include_path: str | Path | None

    @property
    def possible(self) -> dict[Combination, NeuronALConfig]:
        """The combinations that have a config; at least one."""
        return {combination: found for combination, found in self.configs.items() if isinstance(found, NeuronALConfig)}


def check_asked(
    *,
    saliencies: Sequence[str],
    topups: Sequence[str],
    sparsities: Sequence[float],
    dataset: Any,
    evaluate: Sequence | Mapping[str, Any],
    config: Mapping[str, Any],
    value_bits: Sequence[int | None] | int | None = (None,),
    max_windows: int | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
) -> Asked:
    """What [`compare`] is asked for, if nothing is wrong with it that can be known without a model.

    Arguments and errors are those of [`compare`]; `config` holds the further fields of [`NeuronALConfig`].
    """
    if Processes.current().count > 1:
        raise ValueError("compare runs in one process; start it without torchrun or accelerate launch.")
    saliencies = check_texts("saliencies", saliencies, "['wanda']")
    topups = check_texts("topups", topups, "['search']")
    sparsities = check_several("sparsities", sparsities, "[0.6, 0.7]")
    tests, tasks = name_test_sets(evaluate), check_texts("tasks", tasks, "['boolq']")
    for registry, methods in ((SALIENCIES, saliencies), (TOPUPS, topups)):
        for method in methods:
            registry.get(parse_method(method)[0])
    asked_bits = check_value_bits(value_bits)
    combinations = [Combination(*found) for found in product(sparsities, saliencies, topups, asked_bits)]
    if not combinations:
        raise ValueError(
            "There is nothing to compare: name at least one saliency, one top-up, one sparsity and one number of bits."
        )
    if config.get("embedding_bits") is not None:
        raise ValueError("compare measures what becomes of projections, and rounds no head: leave embedding_bits out.")
    configs = make_configs(combinations, dataset, as_json(config))
    asked = Asked(configs, dataset, tests, max_windows, tasks, limit, include_path)
    if isinstance(dataset, str) and any(found.make_methods().needs_calibration for found in asked.possible.values()):
        check_dataset(dataset)
    for test in tests.values():
        if isinstance(test, str):
            check_dataset(test, "test")
    if tasks:
        check_tasks(tasks, include_path, limit)
    return asked


def check_value_bits(value_bits: Sequence[int | None] | int | None) -> list[int | None]:
    """The numbers of bits to compare, from several or from one; None: values stay as they are.

    Raises:
        `TypeError`: neither a number, nor several, nor None.
        `ValueError`: bits that values cannot have.
    """
    if value_bits is None or isinstance(value_bits, int):
        value_bits = [value_bits]
    found = check_several("value_bits", value_bits, "[None, 4, 3]")
    for bits in found:
        if bits is not None and bits not in BITS:
            raise ValueError(f"value_bits holds {bits!r}: expected {', '.join(map(str, BITS))}, or None.")
    return found


def make_config(combination: Combination, dataset, others: dict[str, Any]) -> NeuronALConfig:
    """The config of one combination. With a saliency that knows no rows, a top-up leaves them alone if it can.

    Args:
        combination ([`Combination`]): sparsity, methods and bits.
        dataset: calibration data; the config holds a name or a path only.
        others (`dict[str, Any]`):
            Fields of the config, for all combinations. Among them aliases, which only the top-ups that they belong to
            are given, and which its own hyper-parameters override.

    Raises:
        `ValueError`, `TypeError`: this combination is not possible.
    """
    saliency, saliency_args = parse_method(combination.saliency)
    topup, topup_args = parse_method(combination.topup)
    fields = {name: value for name, value in others.items() if name not in ALIASES}
    aliases = {name: value for name, value in others.items() if name in ALIASES and topup in ALIASES[name].topups}
    without_rows = {} if SALIENCIES.get(saliency).knows_rows else TOPUPS.get(topup).without_rows
    return NeuronALConfig(
        sparsity=combination.sparsity,
        value_bits=combination.value_bits,
        saliency=saliency,
        saliency_args=saliency_args,
        topup=topup,
        topup_args={**without_rows, **aliases, **topup_args},
        dataset=dataset if isinstance(dataset, str) else None,
        **fields,
    )


def make_configs(
    combinations: Sequence[Combination], dataset, others: dict[str, Any]
) -> dict[Combination, NeuronALConfig | str]:
    """Combination -> its config, or why there is none. Arguments: [`make_config`].

    Raises:
        `ValueError`: no combination is possible.
    """
    configs: dict[Combination, NeuronALConfig | str] = {}
    for combination in combinations:
        try:
            configs[combination] = make_config(combination, dataset, others)
        except ValueError as error:
            configs[combination] = " ".join(str(error).split())
    if all(isinstance(config, str) for config in configs.values()):
        raise ValueError(f"No combination is possible: {next(iter(configs.values()))}")
    return configs
