"""The methods of a prune, and the rules for which of them go together."""

from dataclasses import dataclass, replace

from ..blocks.statistics import SquaredNorms
from ..model.projections import Decoder
from ..rotation.learning import Rotation
from ..saliency import Saliency
from ..saliency.plan import ColumnPattern
from ..topup import TopUp


RECONSTRUCT = ("dense", "block")


@dataclass(frozen=True)
class Methods:
    """The methods of a prune: the scores, where the sparsity goes, and which weights may be pruned together."""

    saliency: Saliency
    topup: TopUp
    pattern: ColumnPattern | None = None  # N:M; None: zeros may be anywhere in a row
    reconstruct: str | None = None  # of RECONSTRUCT; None: as the saliency says
    rotation: Rotation | None = None

    @property
    def needs_dense_stream(self) -> bool:
        """True if weights are fitted to the outputs of the dense model, whose stream then runs beside."""
        saliency = self.saliency
        return saliency.updates_weights and (self.reconstruct or saliency.reconstruct) == "dense"

    @property
    def needs_calibration(self) -> bool:
        """True if saliency or top-up look at activations."""
        return (
            self.rotation is not None
            or self.saliency.uses_activations
            or self.topup.uses_calibration
            or self.topup.refines
        )

    @property
    def needs_final_runs(self) -> bool:
        """True if the final pass runs the blocks: for the saliency, or for the statistic that refines masks."""
        return self.saliency.uses_activations or self.topup.statistic is not SquaredNorms

    def suited_to(self, decoder: Decoder) -> "Methods":
        """Return the methods that serve a model, see [`TopUp.suited_to`]. Raise `ValueError` if they cannot."""
        self.topup.check(decoder)
        return replace(self, topup=self.topup.suited_to(decoder))

    def check_together(self, sparsity: float | None) -> None:
        """Raise `ValueError` if the methods do not go together, or the pattern not with the sparsity."""
        saliency, topup, pattern = self.saliency, self.topup, self.pattern
        if saliency.updates_weights and topup.needs_fixed_weights:
            raise ValueError(
                f"The top-up {topup.name!r} decides which weights fall while the others stay, but the saliency "
                f"{saliency.name!r} updates the others too: choose a saliency that leaves them, such as 'wanda'."
            )
        if self.reconstruct and not saliency.updates_weights:
            raise ValueError(
                f"reconstruct is {self.reconstruct!r}, but the saliency {saliency.name!r} leaves the weights that stay as "
                "they are: choose one that updates them, such as 'alps', or leave reconstruct out."
            )
        if pattern is None:
            return
        if topup.decides:
            raise ValueError(
                f"The pattern {pattern} prunes the same share everywhere, so there is nothing for the top-up "
                f"{topup.name!r} to decide: set topup='uniform'."
            )
        if abs(sparsity - pattern.sparsity) > 1e-6:
            raise ValueError(f"The pattern {pattern} means sparsity={pattern.sparsity:g}, but it is {sparsity}.")
