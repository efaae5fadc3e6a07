"""Write the planner's catalogue of public networks, with counted costs.

    python -m tools.catalogue --results results-imagenet.csv --out FILE

The results file is timm's own table of published accuracies.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mdp.errors import InputError
from mdp.files import write_json
from partitioner.estimates.catalogue import Catalogue, Cost, Network
from partitioner.networks.families import Backbone, create
from partitioner.torchvision_shim import import_timm

#: Picture sizes beside a network's own, where it accepts them; the small ones for data such as
#: CIFAR-10.
SIZES = (32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)
#: (name with recipe, family, milliseconds in fp32 and in static int8 of one onnxruntime thread of a
#: Zen 4 core at the published size, where ViT-S/16 at 224 px takes 96.43 and 47.21). Those not
#: measured are predicted by `partitioner.estimates.latency_networks.fit_networks` from
#: benchmarks/results/latency-families.json, scaled by the median ratio of common networks.
NETWORKS: tuple[tuple[str, str, float | None, float | None], ...] = (
    ("mobilenetv4_conv_small_050.e3000_r224_in1k", "MobileNetV4", 1.60, 1.90),
    ("mobilenetv4_conv_small.e2400_r224_in1k", "MobileNetV4", 3.86, 2.43),
    ("mobilenetv4_conv_medium.e500_r256_in1k", "MobileNetV4", 21.43, 9.70),
    ("mobilenetv4_hybrid_medium.ix_e550_r256_in1k", "MobileNetV4-hybrid", 26.58, 13.18),
    ("mobilenetv3_small_100.lamb_in1k", "MobileNetV3", 2.49, 3.74),
    ("mobilenetv3_large_100.miil_in21k_ft_in1k", "MobileNetV3", 6.04, 6.25),
    ("tf_efficientnet_lite0.in1k", "EfficientNet-Lite", 8.90, 4.93),
    ("tf_efficientnet_lite1.in1k", "EfficientNet-Lite", 13.34, 7.50),
    ("tf_efficientnet_lite2.in1k", "EfficientNet-Lite", 18.06, 9.59),
    ("tf_efficientnet_lite3.in1k", "EfficientNet-Lite", 32.02, 15.17),
    ("tf_efficientnet_lite4.in1k", "EfficientNet-Lite", 73.33, 32.72),
    ("lcnet_050.ra2_in1k", "LCNet", 1.95, 3.43),
    ("efficientnet_b0.ra4_e3600_r224_in1k", "EfficientNet", 11.98, 12.93),
    ("efficientnet_b1.ra4_e3600_r240_in1k", "EfficientNet", 19.92, 21.25),
    ("tf_efficientnet_b3.ns_jft_in1k", "EfficientNet", 49.68, 46.90),
    ("hgnetv2_b0.ssld_stage2_ft_in1k", "HGNetV2", 7.26, 4.11),
    ("hgnetv2_b1.ssld_stage2_ft_in1k", "HGNetV2", 11.04, 5.28),
    ("hgnetv2_b2.ssld_stage2_ft_in1k", "HGNetV2", 23.96, 9.71),
    ("hgnetv2_b3.ssld_stage2_ft_in1k", "HGNetV2", 36.01, 13.34),
    ("hgnetv2_b4.ssld_stage2_ft_in1k", "HGNetV2", 52.29, 19.32),
    ("hgnetv2_b5.ssld_stage2_ft_in1k", "HGNetV2", 122.73, 41.33),
    ("repvit_m0_9.dist_450e_in1k", "RepViT", 19.14, 12.19),
    ("repvit_m1_0.dist_450e_in1k", "RepViT", 24.71, 14.43),
    ("repvit_m1_5.dist_450e_in1k", "RepViT", 46.99, 26.52),
    ("levit_128s.fb_dist_in1k", "LeViT", 8.71, 6.68),
    ("levit_192.fb_dist_in1k", "LeViT", 16.54, 9.59),
    ("levit_256.fb_dist_in1k", "LeViT", 25.83, 12.88),
    ("levit_384.fb_dist_in1k", "LeViT", 53.07, 22.06),
    ("efficientvit_b0.r224_in1k", "EfficientViT", 4.46, 6.07),
    ("efficientvit_b1.r224_in1k", "EfficientViT", 13.94, 11.23),
    ("efficientvit_b2.r224_in1k", "EfficientViT", 37.49, 23.36),
    ("fastvit_t8.apple_dist_in1k", "FastViT", 20.22, 25.41),
    ("fastvit_t12.apple_dist_in1k", "FastViT", 31.67, 36.17),
    ("fastvit_sa12.apple_dist_in1k", "FastViT", 42.86, 42.91),
    ("tiny_vit_5m_224.dist_in22k_ft_in1k", "TinyViT", 32.11, 24.05),
    ("tiny_vit_11m_224.dist_in22k_ft_in1k", "TinyViT", 48.86, 28.13),
    ("tiny_vit_21m_224.dist_in22k_ft_in1k", "TinyViT", 100.25, 53.94),
    ("caformer_s18.sail_in22k_ft_in1k", "CAFormer", 92.87, 42.13),
)
_VIT_S_MS, _VIT_S_INT8_MS = 96.43, 47.21
#: Parts of the names of recipes with pictures beyond ImageNet-1k.
_EXTRA = ("in21k", "in22k", "in12k", "jft", "ssld")
_TWO = 2  # a multiply and an accumulate are one


def cost(trunk: nn.Module, image_size: int) -> Cost:
    """The counts of one picture through a network in evaluation mode."""
    kinds = {"pointwise": 0, "spatial": 0, "depthwise": 0}
    seen = {"values": 0, "layers": 0}

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            per_value = module.weight[0].numel()
            if module.groups == module.in_channels and module.groups > 1:
                kind = "depthwise"
            else:
                kind = "pointwise" if module.kernel_size == (1, 1) else "spatial"
        elif isinstance(module, nn.Linear):
            kind, per_value = "pointwise", module.in_features
        else:
            return
        kinds[kind] += output.numel() * per_value
        seen["values"] += output.numel()
        seen["layers"] += 1

    hooks = [module.register_forward_hook(hook) for module in trunk.modules()]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            trunk(torch.zeros(1, 3, image_size, image_size))
    finally:
        for handle in hooks:
            handle.remove()
    total = counted.get_total_flops() // _TWO
    return Cost(**kinds, other=max(0, total - sum(kinds.values())), **seen)


def costs(name: str, own: int) -> dict[int, Cost]:
    """The cost at every picture size that the network accepts."""
    found = {}
    for size in sorted({*SIZES, own}):
        try:
            found[size] = cost(create(Backbone(name, size), 0).eval(), size)
        except (InputError, RuntimeError, AssertionError, ValueError):
            continue
    return found


def read_published(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Model with recipe -> picture sizes and published top-1 in percent."""
    found: dict[str, list[tuple[int, float]]] = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            size, top1 = int(row["img_size"]), float(row["top1"])
            found.setdefault(row["model"], []).append((size, top1))
    return found


def networks(results: Path) -> Iterable[Network]:
    """Every network, counted, at the smallest size that its recipe was published with."""
    known = read_published(results)
    for tagged, family, ms, int8_ms in NETWORKS:
        name, _, recipe = tagged.partition(".")
        size, top1 = min(known[tagged])
        trunk = create(Backbone(name, size), 0).eval()
        with torch.no_grad():
            width = trunk(torch.zeros(1, 3, size, size)).shape[1]
        yield Network(
            name=name,
            recipe=recipe,
            family=family,
            top1=top1,
            image_size=size,
            extra_pictures=any(word in recipe for word in _EXTRA),
            parameters=sum(p.numel() for p in trunk.parameters()),
            width=width,
            costs=costs(name, size),
            vit_s_ratio=None if ms is None else round(ms / _VIT_S_MS, 4),
            vit_s_ratio_int8=None if int8_ms is None else round(int8_ms / _VIT_S_INT8_MS, 4),
        )


def main() -> None:
    """Write the catalogue."""
    parser = argparse.ArgumentParser(description="Write the planner's catalogue of networks.")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    timm = import_timm()
    write_json(asked.out, Catalogue(timm=timm.__version__, networks=list(networks(asked.results))))


if __name__ == "__main__":
    main()
