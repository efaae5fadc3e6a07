"""The inference form of a network: what is folded, what stays, and that it computes the same."""

import torch
from torch import Tensor, nn

from partitioner.networks.inference_form import to_inference_form


def _drawn(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """A batch norm with statistics and scales unlike those that it begins with."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        assert tensor is not None
        tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    return norm


def _noise(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(0))


def _norms(network: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


class _Twice(nn.Module):
    """A convolution whose output is read behind a batch norm, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), _drawn(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        read: Tensor = self.norm(x) + x
        return read


class _Shared(nn.Module):
    """Two convolutions behind which the same batch norm stands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.norm = _drawn(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.first(x)), self.norm(self.second(x))


def test_a_batch_norm_behind_a_convolution_is_folded_into_it() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), _drawn(nn.BatchNorm2d(4)), nn.ReLU6(inplace=True)
    ).eval()
    served = to_inference_form(network, _noise())
    torch.testing.assert_close(served(_noise()), network(_noise()))
    assert (_norms(served), _norms(network)) == (0, 1)
    assert not any(getattr(module, "inplace", False) for module in served.modules())


def test_the_activation_of_a_timm_batch_norm_stays() -> None:
    from timm.layers import BatchNormAct2d

    norm = _drawn(BatchNormAct2d(4, act_layer=nn.Hardswish))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm).eval()
    served = to_inference_form(network, _noise())
    torch.testing.assert_close(served(_noise()), network(_noise()))
    assert _norms(served) == 0
    assert any(isinstance(module, nn.Hardswish) for module in served.modules())


def test_the_network_itself_is_left_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), _drawn(nn.BatchNorm2d(4)), nn.ReLU(inplace=True))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    to_inference_form(network, _noise())
    assert isinstance(network[2], nn.ReLU)
    assert network[2].inplace
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_a_batch_norm_before_a_convolution_stays() -> None:
    network = nn.Sequential(_drawn(nn.BatchNorm2d(3)), nn.Conv2d(3, 4, 3)).eval()
    assert _norms(to_inference_form(network, _noise())) == 1


def test_an_output_that_is_read_elsewhere_keeps_its_batch_norm() -> None:
    network = _Twice().eval()
    served = to_inference_form(network, _noise())
    torch.testing.assert_close(served(_noise()), network(_noise()))
    assert _norms(served) == 1


def test_a_batch_norm_behind_two_convolutions_stays() -> None:
    network = _Shared().eval()
    served = to_inference_form(network, _noise())
    for ours, theirs in zip(served(_noise()), network(_noise()), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert _norms(served) == 1


def test_a_network_that_answers_nan_is_left_unfolded() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), _drawn(nn.BatchNorm2d(4))).eval()
    with torch.no_grad():
        network[0].weight.fill_(torch.nan)  # type: ignore[operator]
    assert _norms(to_inference_form(network, _noise())) == 1


def test_a_batch_norm_without_running_statistics_stays() -> None:
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm).eval()
    served = to_inference_form(network, _noise())
    torch.testing.assert_close(served(_noise()), network(_noise()))
    assert _norms(served) == 1


def test_a_network_without_pairs_is_copied_and_run_once() -> None:
    network = _Counted().eval()
    served = to_inference_form(network, _noise())
    assert isinstance(served, _Counted)
    assert (served.copies, served.runs) == (1, 1)
    assert (network.copies, network.runs) == (0, 0)


class _Counted(nn.Module):
    """A network that counts how often it was copied and run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.copies, self.runs = nn.Conv2d(3, 4, 3), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        read: Tensor = self.conv(x)
        return read

    def __deepcopy__(self, memo: dict[int, object]) -> "_Counted":
        found = _Counted()
        found.load_state_dict(self.state_dict())
        found.copies, found.runs = self.copies + 1, self.runs
        return found.train(self.training)
