"""Networks that a device may serve, and their predicted milliseconds on it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from mdp.errors import InputError
from mdp.formats.plan import Spec, SubModelSpec
from mdp.formats.profile import DeviceProfile
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_members import MemberLatency, fit_members
from partitioner.estimates.macs import memory_bytes
from partitioner.estimates.network import choose_encoding, look_ms, network_ms

#: Sides of pictures in pixels that are tried, up to that of the network's own recipe.
SIDES = (64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class FrozenNetwork:
    """A network with given weights at one picture size: whole, or its first layers."""

    #: timm's name.
    name: str
    spec: Spec

    @property
    def depth(self) -> int:
        """The number of layers kept of a plain ViT; 0 for a network of another family."""
        return self.spec.depth if isinstance(self.spec, SubModelSpec) else 0

    @property
    def words(self) -> str:
        """The name and its cut: `vit_tiny_patch16_224, first 9 layers at 128 px`."""
        size = f"at {self.spec.image_size} px"
        return (
            f"{self.name} {size}"
            if not self.depth
            else f"{self.name}, first {self.depth} layers {size}"
        )


def candidates(names: Sequence[str], shapes: Mapping[str, SubModelSpec]) -> list[FrozenNetwork]:
    """Every size of the networks `names`, and every depth of those with a shape in `shapes`.

    A network that is neither a plain ViT nor in the catalogue has none: its latency is unknown.
    """
    found = []
    for name in names:
        if (shape := shapes.get(name)) is not None:
            found += [
                FrozenNetwork(name, replace(shape, image_size=side, depth=depth))
                for side in SIDES
                if side <= shape.image_size and side % shape.patch_size == 0
                for depth in range(1, shape.depth + 1)
            ]
        elif (network := catalogue().get(name)) is not None:
            found += [
                FrozenNetwork(name, network.spec(side, 0))
                for side in SIDES
                if side in network.sizes_of_weights and side <= network.image_size
            ]
    return found


@dataclass(frozen=True, slots=True)
class DeviceLatency:
    """Predicted milliseconds of candidates on one device, the network included."""

    profile: DeviceProfile
    latency: MemberLatency
    num_classes: int
    #: Whether the device has a camera of its own, so that no picture is sent to it.
    sees: bool

    @classmethod
    def of(cls, profile: DeviceProfile, num_classes: int, *, sees: bool) -> "DeviceLatency":
        """From a profile, in fp32 with its threads; raises InputError where it has no points."""
        return cls(profile, fit_members(profile), num_classes, sees)

    def predict_ms(self, spec: Spec) -> float | None:
        """Computing, and sending a crop unless the device sees; None where it is unknown."""
        try:
            computing_ms = self.latency.predict_ms(spec, self.num_classes)
        except InputError:
            return None
        link = self.profile.link
        if self.sees:
            return computing_ms + look_ms(link, self.num_classes)
        encoding = choose_encoding(link, spec.image_size, self.num_classes)
        return computing_ms + network_ms(link, spec.image_size, self.num_classes, encoding)

    def outside(self, spec: Spec) -> str:
        """In words, the dimensions in which the milliseconds extrapolate; empty if in none."""
        return self.latency.estimate(spec, self.num_classes).outside

    def fits(self, spec: Spec, target_ms: float) -> bool:
        """Tell whether it is predicted to answer within `target_ms`, and fits into the memory."""
        predicted_ms = self.predict_ms(spec)
        if predicted_ms is None or predicted_ms > target_ms:
            return False
        return memory_bytes(spec, self.num_classes) <= self.profile.memory_bytes


def check_fit(
    devices: Sequence[DeviceLatency], some: Sequence[FrozenNetwork], target_ms: float
) -> dict[str, list[int]]:
    """For each device the candidates that keep the target; raises InputError for one with none."""
    found: dict[str, list[int]] = {}
    for device in devices:
        fitting = [row for row, one in enumerate(some) if device.fits(one.spec, target_ms)]
        if not fitting:
            raise InputError(_nothing_fits(device, some, target_ms))
        found[device.profile.name] = fitting
    return found


def remark_on_unknown(
    names: Sequence[str], devices: Sequence[DeviceLatency], some: Sequence[FrozenNetwork]
) -> str:
    """One line on the networks `names` of unknown latency; empty if there are none."""
    tried = {one.name for one in some}
    everywhere = [name for name in names if name not in tried]
    parts = [", ".join(everywhere)] if everywhere else []
    for device in devices:
        unknown = {one.name for one in some if device.predict_ms(one.spec) is None}
        if unknown:
            parts.append(f"{', '.join(sorted(unknown))} on {device.profile.name}")
    return f"not tried, as the latency is unknown: {'; '.join(parts)}" if parts else ""


def remarks_on_extrapolation(
    chosen: Mapping[str, Spec], devices: Sequence[DeviceLatency]
) -> list[str]:
    """One line for each chosen network that is unlike all that its device's profile measured."""
    return [
        f"{device.profile.name}: predicted milliseconds are extrapolated, probe it for better "
        f"ones: {outside}"
        for device in devices
        if (outside := device.outside(chosen[device.profile.name]))
    ]


def _nothing_fits(device: DeviceLatency, some: Sequence[FrozenNetwork], target_ms: float) -> str:
    """One line: the quickest candidate on this device, and its milliseconds."""
    known = [(ms, one) for one in some if (ms := device.predict_ms(one.spec)) is not None]
    if not known:
        return f"profile {device.profile.name!r}: the latency of no network of --weights is known"
    quickest_ms, one = min(known, key=lambda pair: pair[0])
    return (
        f"--latency-ms {target_ms:g}: nothing fits {device.profile.name!r}: the quickest, "
        f"{one.words}, is predicted to take {quickest_ms:.1f} ms there"
    )
