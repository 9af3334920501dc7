"""The mean of sampled softmaxes: log (1/S) sum_l softmax(z^(l) / T), by two routes.

The plain route draws every logit, n x S x c exponentials, chunk by chunk.

The fast route is for covariances that are a scalar s(x) times one matrix, where z^(l) = z + t h^(l) with t = sqrt(s(x))
and shifts h shared by all samples. There exp(z^(l)) factors into exp(z) exp(t h^(l)); samples are sorted by t and cut
into blocks, and within a block exp(t h) is interpolated between its values at J Chebyshev nodes t_j. The normalizers of
all samples and draws are then matrix products:

    Z = sum_j w_j(t) exp(z) exp(t_j h)^T          n x S, instead of n x S x c exponentials

With a = (half a block's width in t) max|h| / T, the relative error is below a^J / (2^(J-1) J!) e^a. Blocks where that
passes the tolerance are cut into smaller ones, and where it still does, every sample gets a node. Blocks depend on the
batch, so the same sample in another batch may differ by that tolerance, which is about what float32 sums in another
order differ by.

Exponentials of a draw are relative to its largest shift M = max h at the middle of the block, so they cannot overflow.
Those below exp(-87) round to zero. That does not matter if exp(-87) is far below the product of the smallest normalizer
and the smallest result, which is checked afterwards; elsewhere the plain route is taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, factorial, log, pi

import torch
from torch import Tensor

from exitwise.calibration.laplace import Posterior

_CHUNK = 1 << 21  # numbers in memory at once in a step of either route
_BLOCKS = 48  # desired number of blocks: the error depends on their width in t, not on their number of samples
_MIN_BLOCK_SIZE, _MAX_BLOCK_SIZE = 64, 256  # beyond 256 samples, computing the exponentials of a block is negligible
_SMALL_BLOCK_SIZE = 16  # of the blocks that too wide ones are cut into
_NODES = 4  # Chebyshev nodes per block
_MIN_NORMALIZER, _MIN_PRODUCT = -60.0, -70.0  # logarithms, far above that of the smallest float32, -87
_TOLERANCE = 1e-6  # relative error of a probability: at most the rounding errors of float32


def sample_logits(logits: Tensor, scale: Tensor, posterior: Posterior, draws: Tensor) -> Tensor:
    """Sample logits (m, S, c) from logits (m, c), the posterior's scale (m,) or (m, c), and standard normals (S, c)."""
    root = posterior.dense_root().to(logits.dtype)
    if posterior.mode == "exact":
        return logits[:, None] + torch.matmul(scale.sqrt()[:, None] * draws, root.T)
    if posterior.mode == "naive":  # deliberately naive: a factorization per sample
        covariance = scale[:, None, None].double() * (posterior.dense_root() @ posterior.dense_root().T).double()
        return logits[:, None] + torch.matmul(draws, torch.linalg.cholesky(covariance).to(logits.dtype).mT)
    return logits[:, None] + scale.sqrt()[:, None, None] * (draws @ root.T)


def log_mean_softmax(sampled: Tensor, temperature: float | Tensor) -> Tensor:
    """Compute the log of the mean over draws of softmax(z / T) (m, c), from sampled logits (m, S, c)."""
    return (sampled / temperature).log_softmax(dim=2).logsumexp(dim=1) - log(sampled.shape[1])


def log_true_softmax(sampled: Tensor, labels: Tensor, temperature: float | Tensor) -> Tensor:
    """Compute the log of the mean probability of the true label (m,), from sampled logits (m, S, c)."""
    z = sampled / temperature
    true = z.gather(2, labels[:, None, None].expand(-1, z.shape[1], 1)).squeeze(2)
    return (true - z.logsumexp(dim=2)).logsumexp(dim=1) - log(sampled.shape[1])


def chunk_slices(n: int, numbers_per_sample: int) -> Iterator[slice]:
    """Yield slices of n samples, so that no step needs more than about `_CHUNK` numbers."""
    size = max(1, _CHUNK // max(numbers_per_sample, 1))
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class _SortedBlocks:
    """Samples sorted by t and cut into blocks of nearly equal t, so that a block shares its exponentials exp(t h)."""

    def __init__(self, t: Tensor) -> None:
        self.samples = len(t)
        self.size = min(self.samples, max(_MIN_BLOCK_SIZE, min(_MAX_BLOCK_SIZE, -(-self.samples // _BLOCKS))))
        if self.size > _SMALL_BLOCK_SIZE:  # so that it can be cut evenly
            self.size -= self.size % _SMALL_BLOCK_SIZE
        self.count = -(-self.samples // self.size)
        self._order = t.detach().argsort()
        # The last block is padded with copies of the last sample; `join` drops their results.
        padding = self._order[-1:].expand(self.count * self.size - self.samples)
        self._index = torch.cat([self._order, padding])
        self.positions = self._index.view(self.count, self.size)  # of the samples of every block

    def cut(self, values: Tensor) -> Tensor:
        """Reorder values (n, ...) from the caller's order to (blocks, size, ...)."""
        return values[self.positions]

    def join(self, values: Tensor) -> Tensor:
        """Reorder values (blocks * size, ...) to (n, ...) in the caller's order."""
        return values[: self.samples][self._order.argsort()]


@dataclass(frozen=True)
class _RelativeShifts:
    """Shifts h (S, c) of all draws relative to the largest of each draw."""

    values: Tensor  # (S, c): h - M, never positive
    largest: Tensor  # (S,): M
    bound: float  # max|h|

    @classmethod
    def of(cls, shifts: Tensor) -> "_RelativeShifts":
        largest = shifts.detach().amax(dim=1)
        return cls(shifts - largest[:, None], largest, float(shifts.detach().abs().max()))

    def of_labels(self, labels: Tensor, t: Tensor, center: Tensor) -> Tensor:
        """Return t h_y - center M (b, m, S) of the true labels (b, m), for t (b, m) and centers (b,) of blocks."""
        offset = (t - center[:, None])[:, :, None] * self.largest
        return torch.addcmul(offset, t[:, :, None], self.values.T[labels])


@dataclass(frozen=True)
class _ChebyshevNodes:
    """Values of t at which exp(t h) is evaluated in b blocks of m samples, and each sample's weights of them."""

    at: Tensor  # (b, J)
    weights: Tensor  # (b, m, J)
    center: Tensor  # (b,)
    half_width: Tensor  # (b,)

    @classmethod
    def between(cls, t: Tensor) -> "_ChebyshevNodes":
        """Return J Chebyshev nodes for every block of t (b, m)."""
        low, high = t.detach().amin(dim=1), t.detach().amax(dim=1)
        center, half = (low + high) / 2, ((high - low) / 2).clamp(min=1e-6)
        u = (t - center[:, None]) / half[:, None]  # in [-1, 1]
        nodes = torch.cos((torch.arange(_NODES, dtype=torch.float64) + 0.5) * pi / _NODES)
        powers = torch.arange(_NODES)
        lagrange = torch.linalg.inv(nodes[:, None] ** powers).to(
            t
        )  # column j: the polynomial that is 1 at node j and 0 at the others
        return cls(center[:, None] + half[:, None] * nodes.to(t), (u[..., None] ** powers) @ lagrange, center, half)

    @classmethod
    def exactly(cls, t: Tensor) -> "_ChebyshevNodes":
        """Return one block per sample of t (n,), with t as its only node: no interpolation."""
        return cls(t[:, None], torch.ones_like(t)[:, None, None], t.detach(), torch.zeros_like(t))

    def __getitem__(self, blocks: slice) -> "_ChebyshevNodes":
        return _ChebyshevNodes(self.at[blocks], self.weights[blocks], self.center[blocks], self.half_width[blocks])

    def interpolable_run(self, shifts: _RelativeShifts, temperature: float, tolerance: float) -> slice:
        """Return the longest run of blocks within the tolerance; sorted by t, the wide blocks are at the ends."""
        a = self.half_width * (shifts.bound / temperature)
        fits = a**_NODES / (2 ** (_NODES - 1) * factorial(_NODES)) * a.exp() <= tolerance
        best, start = slice(0, 0), 0
        for block, fit in enumerate([*fits.tolist(), False]):
            if not fit:
                if block - start > best.stop - best.start:
                    best = slice(start, block)
                start = block + 1
        return best

    def exponentials(self, shifts: _RelativeShifts, temperature: float | Tensor) -> Tensor:
        """Compute exp((t_j h - center M) / T) (b, J, S, c) at the nodes."""
        exponents = self.at[:, :, None, None] * (shifts.values / temperature)
        offset = (self.at - self.center[:, None])[:, :, None] * (shifts.largest / temperature)
        return exponents.add_(offset[..., None]).exp_()

    def normalizers(self, exp_logits: Tensor, exp_shifts: Tensor) -> Tensor:
        """Interpolate Z (b, m, S) from exp(z / T) (b, m, c) and the exponentials at the nodes (b, J, S, c)."""
        at_nodes = torch.bmm(exp_logits, exp_shifts.flatten(1, 2).mT).reshape(
            *exp_logits.shape[:2], *exp_shifts.shape[1:3]
        )
        return torch.sum(at_nodes * self.weights[..., None], dim=2)


def _split_at_run(num_blocks: int, run: slice) -> list[tuple[slice, bool]]:
    """Split blocks into those before, in and after a run; return the non-empty parts and whether they are the run."""
    parts = [(slice(0, run.start), False), (run, True), (slice(run.stop, num_blocks), False)]
    return [(part, inside) for part, inside in parts if part.start < part.stop]


def grid_log_true(
    logits: Tensor | Callable[[Tensor], Tensor],
    labels: Tensor,
    t: Tensor,
    shifts: Tensor,
    temperatures: Tensor,
    tolerance: float = _TOLERANCE,
) -> Tensor:
    """Compute log p(true label) (T, V, n) at every point of a grid, differentiable.

    Only the normalizers are interpolated; the exponentials of the true label are computed exactly.

    Args:
        logits: Logits (n, c), or a function from positions (m,) to their logits (m, c), of which few are held at once.
        labels: True labels (n,).
        t: sqrt(s(x)) (V, n) for each of V prior variances.
        shifts: Shifts (V, S, c) for each of V prior variances.
        temperatures: Temperatures (T,).
        tolerance: Largest relative error of the interpolation.
    """
    draws, classes = shifts.shape[1:]
    blocks = _SortedBlocks(t[len(t) // 2])  # one order for all prior variances, which hardly change it
    labels_all, t_all = blocks.cut(labels), [blocks.cut(row) for row in t]
    relative = [_RelativeShifts.of(row) for row in shifts]
    numbers = _NODES * draws * (blocks.size + classes) + blocks.size * (classes + len(t) * draws)
    groups = []
    for group in chunk_slices(blocks.count, numbers):
        positions = blocks.positions[group].flatten()
        z = logits(positions) if callable(logits) else logits[positions]
        z = (z - z.amax(dim=1, keepdim=True)).view(-1, blocks.size, classes)
        y = labels_all[group]
        z_true = z.gather(2, y[:, :, None]).squeeze(2)
        t_rows = [row[group] for row in t_all]
        nodes = [_ChebyshevNodes.between(row) for row in t_rows]
        points = []
        for temperature in temperatures:
            exp_z = (z / temperature).exp_()
            for v, h in enumerate(relative):
                run = nodes[v].interpolable_run(h, float(temperature.detach()), tolerance)
                ratios = [
                    _block_true_ratios(
                        z[part], y[part], t_rows[v][part], h, temperature, tolerance, nodes[v][part], exp_z[part]
                    )
                    if inside
                    else _narrow_true_ratios(z[part], y[part], t_rows[v][part], h, temperature, tolerance)
                    for part, inside in _split_at_run(len(z), run)
                ]
                points.append(z_true.flatten() / temperature + torch.cat(ratios))
        groups.append(torch.stack(points))
    joined = blocks.join(torch.cat(groups, dim=1).T).T
    return joined.reshape(len(temperatures), len(t), -1)


def _block_true_ratios(
    z: Tensor,
    labels: Tensor,
    t: Tensor,
    shifts: _RelativeShifts,
    temperature: float | Tensor,
    tolerance: float,
    nodes: _ChebyshevNodes,
    exp_z: Tensor,
) -> Tensor:
    """Compute log (1/S) sum_l exp(t h_y / T) / Z_l (b * m,): the contribution of the draws to log p(true label)."""
    normalizers = nodes.normalizers(exp_z, nodes.exponentials(shifts, temperature))
    true_shifts = shifts.of_labels(labels, t, nodes.center)
    ratios = ((true_shifts / temperature).exp_() / normalizers).mean(dim=2)
    if _are_precise(ratios, normalizers):
        return ratios.log().flatten()
    return _narrow_true_ratios(z, labels, t, shifts, temperature, tolerance)


def _narrow_true_ratios(
    z: Tensor, labels: Tensor, t: Tensor, shifts: _RelativeShifts, temperature: float | Tensor, tolerance: float
) -> Tensor:
    """Compute `_block_true_ratios` of blocks that are too wide: in smaller blocks, or without interpolation."""
    rows = []
    if z.shape[1] > _SMALL_BLOCK_SIZE:
        z, labels, t = (values.reshape(-1, _SMALL_BLOCK_SIZE, *values.shape[2:]) for values in (z, labels, t))
        nodes = _ChebyshevNodes.between(t)
        run = nodes.interpolable_run(shifts, _as_float(temperature), tolerance)
        for part, inside in _split_at_run(len(z), run):
            if not inside:
                rows.append(_narrow_true_ratios(z[part], labels[part], t[part], shifts, temperature, tolerance))
                continue
            for group in _groups_of_blocks(part, _SMALL_BLOCK_SIZE, shifts):
                parts = z[group], labels[group], t[group], shifts, temperature, tolerance
                rows.append(_block_true_ratios(*parts, nodes[group], (z[group] / temperature).exp_()))
        return torch.cat(rows)
    if z.shape[1] > 1:
        z, labels, t = z.flatten(0, 1)[:, None], labels.flatten()[:, None], t.flatten()[:, None]
        for part in chunk_slices(len(z), shifts.values.numel()):
            parts = z[part], labels[part], t[part], shifts, temperature, tolerance
            exp_z = (z[part] / temperature).exp_()
            rows.append(_block_true_ratios(*parts, _ChebyshevNodes.exactly(t[part, 0]), exp_z))
        return torch.cat(rows)
    sampled = z + t[:, :, None] * (shifts.values + shifts.largest[:, None])
    return (
        log_true_softmax(sampled, labels[:, 0], temperature) - z.gather(2, labels[:, :, None]).flatten() / temperature
    )


def _are_precise(results: Tensor, normalizers: Tensor) -> bool:
    """Return whether exponentials that round to zero change neither the normalizers nor the results."""
    smallest, result = float(normalizers.detach().min()), float(results.detach().min())
    return smallest >= exp(_MIN_NORMALIZER) and result * smallest >= exp(_MIN_PRODUCT)


def interpolated_log_mean_softmax(
    logits: Tensor, t: Tensor, shifts: Tensor, temperature: float | Tensor, tolerance: float = _TOLERANCE
) -> Tensor:
    """Compute the log of the mean softmax (n, c) from logits (n, c), t = sqrt(s(x)) (n,) and shifts (S, c).

    It is interpolated within `tolerance`, and differentiable.
    """
    blocks, relative = _SortedBlocks(t), _RelativeShifts.of(shifts)
    z, t_all = blocks.cut(logits - logits.amax(dim=1, keepdim=True)), blocks.cut(t)
    # Half the tolerance, because exponentials are interpolated twice: in the normalizers, and in the sum over draws.
    return blocks.join(_blocks_log_probs(z, t_all, relative, temperature, tolerance / 2))


def _blocks_log_probs(
    z: Tensor, t: Tensor, shifts: _RelativeShifts, temperature: float | Tensor, tolerance: float
) -> Tensor:
    """Compute log-probabilities (b * m, c) of blocks of logits (b, m, c) with t (b, m); wide blocks are cut first."""
    nodes = _ChebyshevNodes.between(t)
    run = nodes.interpolable_run(shifts, _as_float(temperature), tolerance)
    rows = []
    for part, inside in _split_at_run(len(z), run):
        if not inside:
            rows.append(_narrow_log_probs(z[part], t[part], shifts, temperature, tolerance))
            continue
        for group in _groups_of_blocks(part, z.shape[1], shifts):
            rows.append(_block_log_probs(z[group], t[group], nodes[group], shifts, temperature, tolerance))
    return torch.cat(rows)


def _block_log_probs(
    z: Tensor,
    t: Tensor,
    nodes: _ChebyshevNodes,
    shifts: _RelativeShifts,
    temperature: float | Tensor,
    tolerance: float,
) -> Tensor:
    """Compute log-probabilities (b * m, c) of narrow blocks of logits (b, m, c) with t (b, m)."""
    exp_shifts, scaled = nodes.exponentials(shifts, temperature), z / temperature
    normalizers = nodes.normalizers(scaled.exp(), exp_shifts)
    weighted = ((1 / normalizers)[:, :, None, :] * nodes.weights[..., None]).flatten(2)  # (b, m, J S)
    sums = torch.bmm(weighted, exp_shifts.flatten(1, 2))
    if _are_precise(sums, normalizers):
        return sums.log_().add_(scaled).sub_(log(len(shifts.largest))).flatten(0, 1)
    return _narrow_log_probs(z, t, shifts, temperature, tolerance)


def _narrow_log_probs(
    z: Tensor, t: Tensor, shifts: _RelativeShifts, temperature: float | Tensor, tolerance: float
) -> Tensor:
    """Compute `_block_log_probs` of blocks that are too wide: in smaller blocks, or without interpolation."""
    if z.shape[1] > _SMALL_BLOCK_SIZE:
        narrow_z, narrow_t = (values.reshape(-1, _SMALL_BLOCK_SIZE, *values.shape[2:]) for values in (z, t))
        return _blocks_log_probs(narrow_z, narrow_t, shifts, temperature, tolerance)
    rows = []
    if z.shape[1] > 1:
        z, t = z.flatten(0, 1)[:, None], t.flatten()[:, None]
        for part in chunk_slices(len(z), shifts.values.numel()):
            nodes = _ChebyshevNodes.exactly(t[part, 0])
            rows.append(_block_log_probs(z[part], t[part], nodes, shifts, temperature, tolerance))
        return torch.cat(rows)
    return log_mean_softmax(z + t[:, :, None] * (shifts.values + shifts.largest[:, None]), temperature)


def _groups_of_blocks(blocks: slice, size: int, shifts: _RelativeShifts) -> Iterator[slice]:
    """Yield slices of blocks of `size` samples, so that no step needs more than about `_CHUNK` numbers."""
    draws, classes = shifts.values.shape
    for group in chunk_slices(blocks.stop - blocks.start, _NODES * (draws + size) * (classes + draws)):
        yield slice(blocks.start + group.start, blocks.start + group.stop)


def _as_float(temperature: float | Tensor) -> float:
    return float(torch.as_tensor(temperature).detach())
