"""Views of pictures drawn anew in every step, on the device that trains."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mdp.formats.plan import Region
from partitioner.data.crops import View
from partitioner.regions import WHOLE

#: A crop's width over height, at most this and at least its inverse.
_ASPECT = 4 / 3
#: Least and largest side of what covers a view, as a share of the view's.
_COVER = (0.2, 0.6)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The distribution of drawn views."""

    #: Smallest share of the picture's area in a crop.
    min_area: float = 0.3
    #: Half of the views are mirrored.
    flip: bool = True
    #: Share of the pictures that are mixed with another one; 0 mixes none, 1 all of them.
    mixed: float = 0.5
    #: Shares in a mixture follow Beta(alpha, alpha); 1 is uniform.
    alpha: float = 1.0
    #: Degrees by which views are turned, at most, either way.
    turn: float = 0.0
    #: Brightness, contrast and saturation change by this share, at most, and single colours by a
    #: quarter of it.
    light: float = 0.0
    #: Share of the views of which a rectangle of one colour covers a part (Zhong and others, Random
    #: erasing data augmentation, AAAI 2020, arXiv 1708.04896).
    covered: float = 0.0

    @property
    def perturbs(self) -> bool:
        """True where views are turned, lit otherwise or covered."""
        return bool(self.turn or self.light or self.covered)


def views_of(
    pictures: Tensor,
    boxes: Tensor,
    flips: Tensor,
    image_size: int,
    share: float = 1.0,
    turns: Tensor | None = None,
) -> Tensor:
    """Float views `[B, 3, S, S]` in 0..255 of uint8 `pictures` `[B, 3, H, W]`.

    `boxes` `[B, 4]` are centre x and y and half-width and half-height in -1..1, `flips` `[B]` are 1
    or -1, and each box is turned about its centre by `turns` `[B]` in radians. Where `share` of a
    picture's side is reduced by half or more it is sampled twice as fine and averaged, so that it
    does not alias.
    """
    oversampling = 2 if pictures.shape[-1] * share >= 2 * image_size else 1
    theta = torch.zeros(len(boxes), 2, 3, device=boxes.device)
    theta[:, 0, 0], theta[:, 0, 2] = boxes[:, 2] * flips, boxes[:, 0]
    theta[:, 1, 1], theta[:, 1, 2] = boxes[:, 3], boxes[:, 1]
    if turns is not None:
        theta[:, :, :2] = rotations(turns) @ theta[:, :, :2]
    fine = image_size * oversampling
    grid = F.affine_grid(theta, [len(boxes), 3, fine, fine], align_corners=False)
    # Bicubic, as served views are resized; it overshoots at edges.
    sampled = F.grid_sample(
        pictures.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False
    )
    return (
        F.avg_pool2d(sampled, oversampling).clamp_(0, 255)
        if oversampling > 1
        else sampled.clamp_(0, 255)
    )


def rotations(turns: Tensor) -> Tensor:
    """Matrices `[B, 2, 2]` that turn by `turns` `[B]` in radians."""
    cosine, sine = turns.cos(), turns.sin()
    return torch.stack(
        [torch.stack([cosine, -sine], dim=1), torch.stack([sine, cosine], dim=1)], dim=1
    )


def random_boxes(count: int, min_area: float, generator: torch.Generator) -> Tensor:
    """Boxes `[count, 4]` of random area, shape and place inside the picture, for `views_of`."""
    device = generator.device
    area = torch.empty(count, device=device).uniform_(min_area, 1.0, generator=generator)
    limit = math.log(_ASPECT)
    aspect = torch.empty(count, device=device).uniform_(-limit, limit, generator=generator).exp()
    half = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=1).clamp_(max=1.0)
    at = torch.empty(count, 2, device=device).uniform_(-1, 1, generator=generator)
    return torch.cat([at * (1 - half), half], dim=1)


def region_boxes(boxes: Tensor, flips: Tensor, region: Region) -> Tensor:
    """Boxes `[B, 4]` of a region of what `boxes` and `flips` show."""
    if region == WHOLE:
        return boxes
    x, y, half_width, half_height = boxes.unbind(dim=1)
    return torch.stack(
        [
            x + half_width * flips * (region.left + region.right - 1),
            y + half_height * (region.top + region.bottom - 1),
            half_width * (region.right - region.left),
            half_height * (region.bottom - region.top),
        ],
        dim=1,
    )


def mix_pairs(x: Tensor, share: Tensor) -> Tensor:
    """Views `[B, 3, S, S]`, each mixed with its neighbour by `share` `[B]`."""
    weight = share.view(-1, 1, 1, 1)
    return x * weight + x.roll(1, 0) * (1 - weight)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Labelled pictures on the device that trains: uint8 `[N, 3, H, W]` and classes `[N]`."""

    pixels: Tensor
    targets: Tensor
    num_classes: int
    #: Where several labels may hold, 1 for each that does and 0 for the others `[N, L]`.
    held: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Changes of a batch of drawn views beside their crop: turned, lit otherwise, covered."""

    #: Radians `[B]`, about the centre of the crop.
    turns: Tensor
    #: Factors of the colours `[B, 3]`, of the contrast `[B]` and of the saturation `[B]`.
    colours: Tensor
    contrast: Tensor
    saturation: Tensor
    #: Left, top, right and bottom edges of what covers a view, in 0..1 of the crop `[B, 4]`, equal
    #: ones where nothing does; and its colour in 0..255 `[B, 3]`.
    covers: Tensor
    cover_colours: Tensor

    @classmethod
    def draw(cls, count: int, drawing: Drawing, generator: torch.Generator) -> "Perturbation":
        """Draw the changes of `count` views."""

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=generator.device, generator=generator)

        def around(*shape: int) -> Tensor:
            return 2 * uniform(*shape) - 1

        light = drawing.light
        sides = _COVER[0] + (_COVER[1] - _COVER[0]) * uniform(count, 2)
        sides = sides * (uniform(count, 1) < drawing.covered)
        begin = uniform(count, 2) * (1 - sides)
        return cls(
            turns=math.radians(drawing.turn) * around(count),
            colours=(1 + light * around(count, 1)) * (1 + light / 4 * around(count, 3)),
            contrast=1 + light * around(count),
            saturation=1 + light * around(count),
            covers=torch.cat([begin, begin + sides], dim=1),
            cover_colours=255 * uniform(count, 3),
        )

    def place(self, boxes: Tensor, crops: Tensor) -> Tensor:
        """Boxes `[B, 4]` within `crops` `[B, 4]`, their centres turned with the crops."""
        offsets = (rotations(self.turns) @ (boxes - crops)[:, :2, None]).squeeze(2)
        return torch.cat([crops[:, :2] + offsets, boxes[:, 2:]], dim=1)

    def relight(self, x: Tensor) -> Tensor:
        """Views `[B, 3, S, S]` in 0..255 in another light."""
        x = x * self.colours[:, :, None, None]
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        x = torch.lerp(mean, x, self.contrast.view(-1, 1, 1, 1))
        grey = x.mean(dim=1, keepdim=True)
        return torch.lerp(grey, x, self.saturation.view(-1, 1, 1, 1)).clamp_(0, 255)

    def cover(self, x: Tensor, region: Region) -> Tensor:
        """Views `[B, 3, S, S]` of a region of the crop, with what covers them."""
        centres = (torch.arange(x.shape[-1], device=x.device) + 0.5) / x.shape[-1]
        across = region.left + (region.right - region.left) * centres
        down = region.top + (region.bottom - region.top) * centres
        left, top, right, bottom = self.covers[:, :, None].unbind(dim=1)
        covered = ((across >= left) & (across < right))[:, None, None, :] & (
            (down >= top) & (down < bottom)
        )[:, None, :, None]
        return torch.where(covered, self.cover_colours[:, :, None, None], x)


@dataclass(frozen=True, slots=True)
class Draw:
    """One batch: which pictures, which crops of them, mirrored or not, mixed by which share."""

    rows: Tensor
    boxes: Tensor
    flips: Tensor
    share: Tensor
    perturbation: Perturbation | None = None

    def views(self, pixels: Tensor, view: View) -> Tensor:
        """The mixed pictures `[B, 3, S, S]` in 0..255 as one device sees them, uncompressed."""
        region, changes = view.region, self.perturbation
        share = min(region.right - region.left, region.bottom - region.top)
        boxes = region_boxes(self.boxes, self.flips, region)
        if changes is None:
            x = views_of(pixels[self.rows], boxes, self.flips, view.image_size, share)
        else:
            boxes = changes.place(boxes, self.boxes)
            x = views_of(
                pixels[self.rows], boxes, self.flips, view.image_size, share, changes.turns
            )
            x = changes.cover(changes.relight(x), region)
        return mix_pairs(x, self.share)

    def labels(self, pictures: Pictures) -> Tensor:
        """The mixed labels as probabilities `[B, C]`."""
        if pictures.held is None:
            one_hot = F.one_hot(pictures.targets[self.rows], pictures.num_classes).float()
        else:
            one_hot = pictures.held[self.rows]
        share = self.share[:, None]
        return one_hot * share + one_hot.roll(1, 0) * (1 - share)


class Draws:
    """Batches without end; every picture at most once an epoch, in an order of the seed."""

    def __init__(
        self, count: int, batch: int, drawing: Drawing, seed: int, device: torch.device
    ) -> None:
        self._count, self._drawing = count, drawing
        #: Pictures in a batch.
        self.batch = min(batch, count)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long, device=device)

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch; what does not fill one is left out of it."""
        return self._count // self.batch

    def __call__(self) -> Draw:
        """The next batch."""
        drawing, generator, size = self._drawing, self._generator, self.batch
        if len(self._order) < size:
            device = generator.device
            self._order = torch.randperm(self._count, device=device, generator=generator)
        rows, self._order = self._order[:size], self._order[size:]
        drawn = torch.rand(3, size, device=rows.device, generator=generator)
        share = drawn[2] if drawing.alpha == 1 else self._beta(size)
        ones = torch.ones_like(share)
        return Draw(
            rows=rows,
            boxes=random_boxes(size, drawing.min_area, generator),
            flips=torch.where(drawn[0] < 0.5, ones, -ones) if drawing.flip else ones,
            share=torch.where(drawn[1] < drawing.mixed, share, ones),
            perturbation=Perturbation.draw(size, drawing, generator) if drawing.perturbs else None,
        )

    def _beta(self, size: int) -> Tensor:
        """Shares `[size]` of Beta(alpha, alpha), from two gamma variates each."""
        alpha = torch.full((2, size), self._drawing.alpha, device=self._generator.device)
        drawn = torch._standard_gamma(alpha, generator=self._generator).clamp_min(1e-30)
        shares: Tensor = drawn[0] / drawn.sum(dim=0)
        return shares
