"""A group-wise policy composed of a partition, a threshold rule, a scaling and a noise allocation."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping.allocation import TOLERANCE, GivenNoise, GlobalNoise, NoiseAllocation, same_groups
from ghostclip.clipping.groups import Groupwise, joint_weights
from ghostclip.clipping.partitions import ByLayer, Partition
from ghostclip.clipping.scaling import AutoS, AutoV, Clip, NormScaling, Psac
from ghostclip.clipping.thresholds import EqualShare, JointBound, Quantiles, ThresholdRule
from ghostclip.errors import PrivacyError
from ghostclip.norms.reduce import margin
from ghostclip.validate import positive

__all__ = ["Composed"]

SCALINGS = (Clip, AutoS, AutoV, Psac)


class Composed(Groupwise):
    """Group-wise clipping, composed of four parts that can be combined freely.

    The gradient of each group k is scaled to its threshold C_k, and each group has its own noise. One example's whole
    contribution is at most sqrt(sum_k C_k^2), the sensitivity.

    Args:
        partition: the groups of parameters, such as `ByLayer`.
        thresholds: the rule for the thresholds C_k, such as `Quantiles`. A number C stands for ``EqualShare(C)``. The
            rule is evaluated once, and after each update of `Quantiles`.
        scaling: from norms and thresholds to weights, such as `Clip`. The weights of a scaling of yours are clamped so
            that no weighted norm exceeds its threshold.
        noise: the allocation of noise to the groups, such as `EqualNoise`. An allocation of yours must give the
            engine's noise multiplier.

    Raises:
        TypeError: an argument is none of these.
        ValueError: a scaling is given beside `JointBound`. In `partition`: the parts don't fit the model's groups.
    """

    def __init__(
        self,
        partition: Partition | None = None,
        thresholds: ThresholdRule | float = 1.0,
        scaling: NormScaling | None = None,
        noise: NoiseAllocation | None = None,
    ) -> None:
        self.partition_rule = ByLayer() if partition is None else partition
        self.rule = thresholds if isinstance(thresholds, ThresholdRule) else EqualShare(thresholds)
        self.scaling = Clip() if scaling is None else scaling
        self.noise = GlobalNoise() if noise is None else noise
        parts = {"partition": (self.partition_rule, Partition), "noise": (self.noise, NoiseAllocation)}
        for name, (given, kind) in parts.items():
            if not isinstance(given, kind):
                raise TypeError(f"{name} must be a {kind.__name__} of ghostclip.clipping; got {given!r}")
        if not callable(self.scaling):
            raise TypeError(f"scaling must be a function of (norms, threshold); got {self.scaling!r}")
        if isinstance(self.rule, Quantiles) and type(self.rule) is not Quantiles:
            raise TypeError(f"thresholds is of a subclass of Quantiles, whose counts nothing bounds; got {self.rule!r}")
        if isinstance(self.rule, Quantiles) and isinstance(self.noise, GivenNoise):
            raise ValueError(
                "GivenNoise goes with thresholds that stay, and Quantiles' follow the norms; use ProportionalNoise"
            )
        if scaling is not None and isinstance(self.rule, JointBound):
            raise ValueError("JointBound has a function of its own in place of a scaling; leave scaling out")
        self._sizes: dict[str, int] = {}
        self._thresholds: dict[str, float] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("partition_rule", "rule", "scaling", "noise") and name in vars(self):
            raise AttributeError(
                f"{name} of a Composed policy stays as it was given: what an engine checks of it would not hold of "
                "another one; build a Composed with it, and an engine or GhostClipper with that"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Composed({self.partition_rule!r}, {self.rule!r}, {self.scaling!r}, {self.noise!r})"

    def anew(self) -> Composed:
        """A copy, which learns the groups of one model; what thresholds learnt is of one engine's data, and goes."""
        found = copy.deepcopy(self)
        if isinstance(found.rule, Quantiles):
            vars(found)["rule"] = found.rule.anew()
        return found

    def partition(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: group} for {parameter name: number of entries}; thresholds are for these groups from now."""
        groups = self.partition_rule.groups(sizes)
        if set(groups) != set(sizes):
            raise ValueError(f"a partition must give a group for each of {list(sizes)}; got {groups}")
        self._sizes = dict.fromkeys(groups.values(), 0)
        for name, group in groups.items():
            self._sizes[group] += sizes[name]
        self._read_thresholds()
        return groups

    def _read_thresholds(self) -> None:
        """Asks the rule. Weights, sensitivity and noise are by one answer, whatever the rule says next time."""
        found = self.rule.thresholds(dict(self._sizes))
        same_groups("thresholds", set(self._sizes), set(found))
        self._thresholds = {group: positive(**{f"thresholds[{group!r}]": found[group]}) for group in self._sizes}

    @property
    def thresholds(self) -> dict[str, float]:
        """{group: C_k} as they are now; PrivacyError before the policy is given to a model."""
        if self._thresholds is None:
            raise PrivacyError("the groups of a Composed policy are known once it is given to a GhostClipper or engine")
        return dict(self._thresholds)

    @property
    def sensitivity(self) -> float:
        """The root of the sum of the squared thresholds."""
        thresholds = self.thresholds
        return self.rule.max_norm if isinstance(self.rule, JointBound) else math.hypot(*thresholds.values())

    def weights(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{group: weights [B]} from {group: norms [B]}."""
        if isinstance(self.rule, JointBound):
            return joint_weights(self.rule.function, self.rule.max_norm, norms)
        stacked = torch.stack(list(norms.values()))
        bounds = self.thresholds
        limits = stacked.new_tensor([bounds[group] * margin(stacked.dtype) for group in norms]).unsqueeze(1)
        is_own = type(self.scaling) in SCALINGS  # each is within its threshold by its formula
        found = self.scaling(stacked, limits) if is_own else self.scaling(stacked.clone(), limits.clone())
        if not isinstance(found, Tensor) or found.shape != stacked.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            expected = list(stacked.shape)
            raise ValueError(f"a scaling must return weights of the shape of its norms, {expected}; got {shape}")
        if not is_own:
            most = limits / stacked.clamp_min(torch.finfo(stacked.dtype).tiny)
            weights = torch.nan_to_num(found.to(stacked.dtype), nan=0.0)
            found = torch.minimum(torch.maximum(weights, -most), most)
        return dict(zip(norms, found.unbind(), strict=True))

    def noise_stds(self, sigma: float) -> dict[str, float]:
        """{group: standard deviation of the noise in its sum} for the noise multiplier ``sigma``.

        Raises:
            ValueError: the allocation names other groups, or makes a smaller noise multiplier.
        """
        bounds, sizes = self.thresholds, dict(self._sizes)
        if isinstance(self.rule, JointBound):
            stds = self.noise.stds_of_joint_bound(sigma, self.rule.max_norm, sizes)
        else:
            stds = self.noise.stds(sigma, bounds, sizes)
        same_groups("the noise allocation", set(bounds), set(stds))
        if sigma:
            shares = [bounds[group] / positive(**{f"the std of {group!r}": std}) for group, std in stds.items()]
            found = 1.0 / (max(shares) if isinstance(self.rule, JointBound) else math.hypot(*shares))
            if found < sigma * (1.0 - TOLERANCE):
                raise ValueError(f"the noise allocation makes a noise multiplier of {found!r}; it must be {sigma!r}")
        return stds

    @property
    def weighs_each_alone(self) -> bool:
        """Whether an example's weights follow from its own norms for certain: no function of the user's decides."""
        return type(self.scaling) in SCALINGS and not isinstance(self.rule, JointBound)

    @property
    def counted(self) -> int:
        """How many counts each step releases: one for each group whose threshold follows a quantile."""
        return len(self.thresholds) if isinstance(self.rule, Quantiles) else 0

    def counts(self, norms: Mapping[str, Tensor]) -> Tensor:
        """`Quantiles.counts`."""
        return self._quantiles.counts(norms)

    def count_noise_for(self, batch_size: int) -> float:
        """The standard deviation of the noise on each count, for an expected batch size."""
        return self._quantiles.count_noise_for(batch_size, self.counted)

    def update(self, shares: Sequence[float]) -> None:
        """`Quantiles.update`."""
        self._quantiles.update(shares)
        self._read_thresholds()

    @property
    def _quantiles(self) -> Quantiles:
        assert isinstance(self.rule, Quantiles)
        return self.rule

    def state_dict(self) -> dict[str, Any]:
        """What training changes: the state of the threshold rule."""
        return self.rule.state_dict() if isinstance(self.rule, Quantiles) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a `state_dict` back."""
        if isinstance(self.rule, Quantiles):
            self.rule.load_state_dict(state)
            if self._sizes:
                self._read_thresholds()
