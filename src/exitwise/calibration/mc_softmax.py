"""The mean of sampled softmaxes: log (1/S) sum_l softmax(z^(l) / T), by two routes.

The plain route draws every logit, n x S x c exponentials, chunk by chunk.

The fast route is for covariances that are a scalar s(x) times one matrix, where z^(l) = z + t h^(l) with t = sqrt(s(x))
and shifts h shared by all samples. There exp(z^(l)) factors into exp(z) exp(t h^(l)); samples are sorted by t and cut
into blocks, and within a block exp(t h) is interpolated between its values at J Chebyshev nodes t_j. The normalizers of
all samples and draws are then matrix products:

    Z = sum_j w_j(t) exp(z) exp(t_j h)^T          n x S, instead of n x S x c exponentials

With a = (half a block's width in t) max|h| / T, the relative error is below a^J / (2^(J-1) J!) e^a. Samples of blocks
where that passes the tolerance get a node each, and those whose exponentials could overflow take the plain route.
Blocks depend on the batch, so the same sample in another batch may differ by that tolerance, which is about what
float32 sums in another order differ by.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial, log, pi

import torch
from torch import Tensor

from exitwise.calibration.laplace import Posterior

_CHUNK = 1 << 21  # numbers in memory at once in a step of either route
_BLOCKS = 48  # desired number of blocks: the error depends on their width in t, not on their number of samples
_MIN_BLOCK_SIZE = 64
_NODES = 4  # Chebyshev nodes per block
_MAX_EXPONENT = 30.0  # largest |t h / T|: float32 can represent every ratio of exponentials, up to e^60, with a margin
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
        self.size = min(self.samples, max(_MIN_BLOCK_SIZE, -(-self.samples // _BLOCKS)))
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
class _ChebyshevNodes:
    """Values of t at which exp(t h) is evaluated in b blocks of m samples, and each sample's weights of them."""

    at: Tensor  # (b, J)
    weights: Tensor  # (b, m, J)
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
        return cls(center[:, None] + half[:, None] * nodes.to(t), (u[..., None] ** powers) @ lagrange, half)

    @classmethod
    def exactly(cls, t: Tensor) -> "_ChebyshevNodes":
        """Return one block per sample of t (n,), with t as its only node: no interpolation."""
        return cls(t[:, None], torch.ones_like(t)[:, None, None], torch.zeros_like(t))

    def __getitem__(self, blocks: slice) -> "_ChebyshevNodes":
        return _ChebyshevNodes(self.at[blocks], self.weights[blocks], self.half_width[blocks])

    def interpolable_run(self, largest_shift: float, tolerance: float) -> slice:
        """Return the longest run of blocks within the tolerance; sorted by t, the wide blocks are at the ends."""
        a = self.half_width * largest_shift
        error = a**_NODES / (2 ** (_NODES - 1) * factorial(_NODES)) * a.exp()
        fits = (error <= tolerance) & (self.at.amax(dim=1) * largest_shift <= _MAX_EXPONENT)
        best, start = slice(0, 0), 0
        for block, fit in enumerate([*fits.tolist(), False]):
            if not fit:
                if block - start > best.stop - best.start:
                    best = slice(start, block)
                start = block + 1
        return best

    def exponentials(self, shifts: Tensor, temperature: float | Tensor) -> Tensor:
        """Compute exp(t_j h / T) (b, J, S, c) at the nodes."""
        return (self.at[:, :, None, None] * (shifts / temperature)).exp()

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
    largest = [float(row.detach().abs().max()) for row in shifts]
    numbers = _NODES * draws * (blocks.size + classes) + blocks.size * (classes + len(t) * draws)
    groups = []
    for group in chunk_slices(blocks.count, numbers):
        z = logits(blocks.positions[group].flatten()) if callable(logits) else logits[blocks.positions[group].flatten()]
        z = (z - z.amax(dim=1, keepdim=True)).view(-1, blocks.size, classes)
        y = labels_all[group]
        z_true = z.gather(2, y[:, :, None]).squeeze(2)
        t_rows = [row[group] for row in t_all]
        nodes = [_ChebyshevNodes.between(row) for row in t_rows]
        true_shifts = [row[:, :, None] * h.T[y] for row, h in zip(t_rows, shifts, strict=True)]
        points = []
        for temperature in temperatures:
            exp_z = (z / temperature).exp()
            for v, h in enumerate(shifts):
                run = nodes[v].interpolable_run(largest[v] / float(temperature.detach()), tolerance)
                ratios = [
                    _true_ratios(exp_z[part], true_shifts[v][part], nodes[v][part], h, temperature).flatten()
                    if inside
                    else _uninterpolated_true_ratios(z[part], y[part], t_rows[v][part], h, temperature, largest[v])
                    for part, inside in _split_at_run(len(z), run)
                ]
                points.append(z_true.flatten() / temperature + torch.cat(ratios))
        groups.append(torch.stack(points))
    joined = blocks.join(torch.cat(groups, dim=1).T).T
    return joined.reshape(len(temperatures), len(t), -1)


def _true_ratios(
    exp_z: Tensor, true_shifts: Tensor, nodes: _ChebyshevNodes, shifts: Tensor, temperature: float | Tensor
) -> Tensor:
    """Compute log (1/S) sum_l exp(t h_y / T) / Z_l (b, m): the contribution of the draws to log p(true label)."""
    normalizers = nodes.normalizers(exp_z, nodes.exponentials(shifts, temperature))
    return ((true_shifts / temperature).exp() / normalizers).mean(dim=2).log()


def _uninterpolated_true_ratios(
    z: Tensor, labels: Tensor, t: Tensor, shifts: Tensor, temperature: float | Tensor, largest: float
) -> Tensor:
    """Compute `_true_ratios` (b * m,) of whole blocks without interpolation."""
    z, labels, t = z.flatten(0, 1), labels.flatten(), t.flatten()
    rows = []
    for part in chunk_slices(len(z), shifts.numel()):
        z_part, t_part, y = z[part], t[part], labels[part]
        if float(t_part.detach().max()) * largest / float(torch.as_tensor(temperature).detach()) <= _MAX_EXPONENT:
            true_shifts = (t_part[:, None] * shifts.T[y])[:, None]
            exp_z = (z_part / temperature).exp()[:, None]
            rows.append(
                _true_ratios(exp_z, true_shifts, _ChebyshevNodes.exactly(t_part), shifts, temperature).flatten()
            )
        else:
            sampled = z_part[:, None] + t_part[:, None, None] * shifts
            z_true = z_part.gather(1, y[:, None]).squeeze(1) / temperature
            rows.append(log_true_softmax(sampled, y, temperature) - z_true)
    return torch.cat(rows)


def interpolated_log_mean_softmax(
    logits: Tensor, t: Tensor, shifts: Tensor, temperature: float | Tensor, tolerance: float = _TOLERANCE
) -> Tensor:
    """Compute the log of the mean softmax (n, c) from logits (n, c), t = sqrt(s(x)) (n,) and shifts (S, c).

    It is interpolated within `tolerance`, and differentiable.
    """
    draws, classes = shifts.shape
    blocks = _SortedBlocks(t)
    z_all, t_all = blocks.cut(logits - logits.amax(dim=1, keepdim=True)), blocks.cut(t)
    nodes = _ChebyshevNodes.between(t_all)
    largest = float(shifts.detach().abs().max()) / float(torch.as_tensor(temperature).detach())
    # Half the tolerance, because exponentials are interpolated twice: in the normalizers, and in the sum over draws.
    run = nodes.interpolable_run(largest, tolerance / 2)
    rows = []
    for part, inside in _split_at_run(blocks.count, run):
        z, t_part = z_all[part], t_all[part]
        if inside:
            for group in chunk_slices(len(z), _NODES * (draws + blocks.size) * (classes + draws)):
                rows.append(_log_probs(z[group], nodes[part][group], shifts, temperature))
            continue
        z, t_part = z.flatten(0, 1), t_part.flatten()
        for group in chunk_slices(len(z), shifts.numel()):
            if float(t_part[group].detach().max()) * largest <= _MAX_EXPONENT:
                rows.append(_log_probs(z[group, None], _ChebyshevNodes.exactly(t_part[group]), shifts, temperature))
            else:
                rows.append(log_mean_softmax(z[group, None] + t_part[group, None, None] * shifts, temperature))
    return blocks.join(torch.cat(rows))


def _log_probs(z: Tensor, nodes: _ChebyshevNodes, shifts: Tensor, temperature: float | Tensor) -> Tensor:
    """Compute log-probabilities (b * m, c) of blocks of logits (b, m, c)."""
    z = z / temperature
    exp_shifts = nodes.exponentials(shifts, temperature)
    inverse = 1 / nodes.normalizers(z.exp(), exp_shifts)
    weighted = (inverse[:, :, None, :] * nodes.weights[..., None]).flatten(2)  # (b, m, J S)
    return (z + torch.bmm(weighted, exp_shifts.flatten(1, 2)).log() - log(len(shifts))).flatten(0, 1)
