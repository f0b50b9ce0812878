"""`CostModel`: the costs of launches, loads and fetches, learned from measured ones.

Owns fits of a few coefficients each. Never reads a clock: seconds come from the caller. The same samples in the same
order give the same numbers on every rank, whatever predictions are made in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang.srt.mem_cache.transfer import BACKUP_LINKS, D2H, D2P, D2S, H2D, P2D, STORE_LINKS

# Links whose operations are measured, and what moves the same pages the other way; nothing does for the swap file's.
_OTHER_WAY = {H2D: D2H, P2D: D2P, D2H: H2D, D2P: P2D, D2S: D2S}
MEASURED_LINKS = tuple(_OTHER_WAY)
# The weight of a sample shrinks by this factor with every later one: some 30 launches are remembered.
_DECAY = 0.97
# The first samples are taken as they are. Later ones may be at most this many times faster than expected, but for the
# last of `_FAST_IN_A_ROW`. Slow ones need no limit, because their rows are small.
_BELIEVED = 5
_FASTER = 3.0
# Backups that must be faster than loads before those are doubted, the first time, and how much longer each next time.
_PATIENCE = 8
# So many samples in a row that took so many times longer than expected: what came before counts, in all, as this
# share of the last one.
_SLOW_IN_A_ROW = 3
_SLOWER = 3.0
_FORGET = 1e-3
# So many samples in a row, or fetches, that were so many times faster than expected refute what was measured before.
_FAST_IN_A_ROW = 3
_FAST_FETCHES_IN_A_ROW = 2
# The first samples change the fit one by one, later ones in groups of this size.
_REFIT_EVERY = 8
# A fit tells nothing of operations that are so many times larger than all that were measured.
_KNOWN_TIMES = 8
# What a token costs on a link is judged by an operation of so many: pages are copied together, and while a link
# becomes slower the samples may not tell what an operation costs from what its bytes cost.
USUAL_TOKENS = 1024


class _Change(Enum):
    """What has become clear of all operations."""

    SLOWER = auto()
    FASTER = auto()


class _Fit:
    """seconds = coefficients . features, all coefficients >= 0: decayed least squares over relative errors,

        minimise  sum_n decay**age_n * (coefficients . features_n / seconds_n - 1)**2 + sum_i ridge_i * scaled_i**2,

    where scaled_i is coefficient i times its feature's root of the decayed sum of squares. Dividing by the measured
    seconds makes short launches count as much as long ones, and slow outliers hardly at all.

    ridge: where the samples do not tell features apart, as when all are alike, the feature with the least ridge gets
    all of the cost.
    """

    def __init__(self, ridge: Sequence[float]) -> None:
        self.num_samples = 0
        # The last ones in a row that took far longer than expected, or were far faster.
        self._num_slow = self.num_fast = 0
        self.coefficients = [0.0] * len(ridge)
        self._ridge = tuple(ridge)
        self._gram = [[0.0] * len(ridge) for _ in ridge]
        self._moments = [0.0] * len(ridge)

    def add(self, features: Sequence[float], seconds: float) -> _Change | None:
        """Returns whether it has become clear that everything takes far longer now, or far less. Samples without a
        duration (0, infinite, not a number) are left out."""
        if not 0 < seconds < math.inf:
            return None
        if self.num_samples >= _BELIEVED:
            expected = self.seconds(features)
            self._num_slow = self._num_slow + 1 if seconds > _SLOWER * expected else 0
            self.num_fast = self.num_fast + 1 if _FASTER * seconds < expected else 0
            # The last of several in a row counts as it is. Its row is so large that the others no longer matter.
            if self.num_fast < _FAST_IN_A_ROW:
                seconds = max(seconds, expected / _FASTER)
        change = None
        row = [feature / seconds for feature in features]
        if self.num_fast == _FAST_IN_A_ROW:
            change, self.num_fast = _Change.FASTER, 0
        elif self._num_slow == _SLOW_IN_A_ROW:
            change, self._num_slow = _Change.SLOWER, 0
            kept = min(_FORGET * a * a / self._gram[i][i] for i, a in enumerate(row) if a and self._gram[i][i])
            self._moments = [kept * moment for moment in self._moments]
            self._gram = [[kept * g for g in each] for each in self._gram]
        moments = self._moments
        for i, a in enumerate(row):
            moments[i] = _DECAY * moments[i] + a
            self._gram[i] = [_DECAY * g + a * b for g, b in zip(self._gram[i], row)]
        self.num_samples += 1
        if change is not None or self.num_samples <= _REFIT_EVERY or self.num_samples % _REFIT_EVERY == 0:
            self._refit()
        return change

    def seconds(self, features: Sequence[float]) -> float:
        return sum([c * f for c, f in zip(self.coefficients, features)])

    def _refit(self) -> None:
        gram = self._gram
        # A feature that never occurred, or so long ago that its weight is gone, has no coefficient.
        seen = [i for i in range(len(gram)) if gram[i][i] > 1e-200]
        scale = [math.sqrt(gram[i][i]) for i in seen]
        matrix = [[gram[i][j] / (a * b) for j, b in zip(seen, scale)] for i, a in zip(seen, scale)]
        for n, i in enumerate(seen):
            matrix[n][n] = 1 + self._ridge[i]
        solution = non_negative_solution(matrix, [self._moments[i] / a for i, a in zip(seen, scale)])
        self.coefficients = [0.0] * len(gram)
        for i, a, x in zip(seen, scale, solution):
            self.coefficients[i] = x / a


class _CopyFit(_Fit):
    """seconds = latency_s + byte_s * bytes, of an operation. What samples do not tell apart is put down to bytes."""

    def __init__(self) -> None:
        super().__init__(ridge=(1e-3, 1e-6))
        # Of recent operations, in bytes.
        self._largest = 0.0

    def add_copy(self, num_bytes: int, seconds: float) -> _Change | None:
        """See `_Fit.add`."""
        self._largest = max(num_bytes, _DECAY * self._largest)
        return self.add((1.0, num_bytes), seconds)

    def knows(self, num_bytes: float) -> bool:
        """Whether operations of about that size or larger ones were measured: a far smaller one does not tell
        whether latency or bytes took its time."""
        return self.num_samples > 0 and num_bytes <= _KNOWN_TIMES * self._largest


def _informed(fits: Sequence[_CopyFit], num_bytes: float) -> list[_CopyFit]:
    """Those that know of operations of that size; if none does, those that have samples."""
    return [fit for fit in fits if fit.knows(num_bytes)] or [fit for fit in fits if fit.num_samples]


def _mean_seconds(fits: Sequence[_CopyFit], num_bytes: float) -> float:
    """What an operation takes, in the mean of some fits."""
    return sum(fit.seconds((1.0, num_bytes)) for fit in fits) / len(fits)


def non_negative_solution(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The x >= 0 that minimises x.matrix.x / 2 - vector.x; matrix: symmetric, positive definite, of a few rows.

    Lawson and Hanson, Solving Least Squares Problems, algorithm 23.10, on normal equations: coefficients are set free
    one by one, the most promising first, and held at 0 again where they would become negative.
    """
    x = [0.0] * len(vector)
    free: list[int] = []
    for _ in range(4 * len(vector)):  # far more than it takes; rounding must not make it go round for ever
        gains = [v - sum([m * each for m, each in zip(row, x)]) for row, v in zip(matrix, vector)]
        held = [i for i in range(len(x)) if i not in free and gains[i] > 1e-9 * vector[i]]
        if not held:
            break
        free.append(max(held, key=gains.__getitem__))
        while True:
            goal = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            if min(goal) > 0:
                for i, z in zip(free, goal):
                    x[i] = z
                break
            # Move towards the goal as far as no coefficient becomes negative.
            step, blocker = min((x[i] / (x[i] - z) if x[i] > 0 else 0.0, i) for i, z in zip(free, goal) if z <= 0)
            for i, z in zip(free, goal):
                x[i] = max(0.0, x[i] + step * (z - x[i]))
            x[blocker] = 0.0
            free.remove(blocker)
            if not free:
                break
    return x


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination; a positive definite matrix needs no pivots. Overwrites its arguments."""
    n = len(vector)
    for k in range(n):
        pivot = matrix[k]
        for i in range(k + 1, n):
            factor = matrix[i][k] / pivot[k]
            vector[i] -= factor * vector[k]
            for j in range(k + 1, n):
                matrix[i][j] -= factor * pivot[j]
    for k in reversed(range(n)):
        for j in range(k + 1, n):
            vector[k] -= matrix[k][j] * vector[j]
        vector[k] /= matrix[k][k]
    return vector


@dataclass(frozen=True)
class LoadLimit:
    """How many tokens a batch may load before it is bound by loading: free + per_token * new + per_pair * pairs."""

    free: float
    per_token: float
    per_pair: float

    def num_tokens(self, new_tokens: int, pairs: float) -> float:
        return self.free + self.per_token * new_tokens + self.per_pair * pairs


class _PrefillFit(_Fit):
    """seconds = fixed_s + token_s * new + context_s * prefix + pair_s * pairs, of a launch.

    A token that is computed is attended to as well, so that context_s is counted for new tokens, too, and token_s is
    at least as much. Without that bound a few prompts with the same short prefix put all their seconds down to the
    prefix, as it is the same in all: then computing looked free, and loads did not pay. The ridge of context_s keeps
    noise from doing the same in a lesser degree; where prefixes differ, it changes little.
    """

    def __init__(self) -> None:
        super().__init__(ridge=(1e-3, 1e-6, 1e-2, 1e-3))

    @staticmethod
    def features(launches: float, new: float, prefix: float, pairs: float) -> tuple[float, ...]:
        return launches, new, new + prefix, pairs

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """fixed_s, token_s, context_s, pair_s."""
        fixed_s, more_s, context_s, pair_s = self.coefficients
        return fixed_s, context_s + more_s, context_s, pair_s


class StoreCosts:
    """Of reads and writes of one store. usual_bytes: of USUAL_TOKENS."""

    def __init__(self, usual_bytes: float) -> None:
        self._usual_bytes = usual_bytes
        self._fetch, self._store = _CopyFit(), _CopyFit()
        self._num_fast_fetches = 0

    @property
    def fetch_coefficients(self) -> list[float]:
        return self._fetch.coefficients

    def add_fetch(self, num_bytes: int, seconds: float) -> None:
        """Seconds for which an operation that read all its bytes held its link. What looks slow is not fetched: a few
        small reads have to show that it has become fast."""
        is_fast = 0 < _FASTER * seconds < self._fetch.seconds((1.0, num_bytes))
        self._num_fast_fetches = self._num_fast_fetches + 1 if is_fast else 0
        if self._num_fast_fetches == _FAST_FETCHES_IN_A_ROW:
            self._fetch, self._num_fast_fetches = _CopyFit(), 0
        self._fetch.add_copy(num_bytes, seconds)

    def fetch_seconds(self, num_ops: int, num_bytes: int) -> float | None:
        """Seconds of operations one after another: fetch_latency_s * ops + fetch_byte_s * bytes. While no fetch was
        measured, as many as storing takes; None while nothing was."""
        fits = _informed((self._fetch, self._store), num_bytes / num_ops)
        return fits[0].seconds((num_ops, num_bytes)) if fits else None

    def add_store(self, num_bytes: int, seconds: float) -> None:
        """Seconds for which an operation that wrote all its bytes held its link."""
        self._store.add_copy(num_bytes, seconds)

    def store_seconds(self, num_bytes: int) -> float | None:
        """Of one operation, as `fetch_seconds`."""
        fits = _informed((self._store, self._fetch), num_bytes)
        return fits[0].seconds((1.0, num_bytes)) if fits else None

    def usual_seconds(self, num_tokens: int) -> float | None:
        """Seconds for which reading tokens, or writing them, takes the link, as a part of operations of USUAL_TOKENS.
        None while nothing was measured."""
        fits = _informed((self._store, self._fetch), self._usual_bytes)
        return _mean_seconds(fits, self._usual_bytes) * num_tokens / USUAL_TOKENS if fits else None


class CostModel:
    """bytes_per_token: the size of a token's KV on the link that loads it. kernel_links: their loads wait for a GPU's
    prefills, and count as no slower than backups. Otherwise what is computed instead would make loads slow, and
    slow loads would be computed instead."""

    def __init__(self, bytes_per_token: float, kernel_links: Collection[str] = ()) -> None:
        if not bytes_per_token > 0:
            raise ValueError(f"bytes per token must be above 0, got {bytes_per_token}")
        self._bytes_per_token = bytes_per_token
        self._kernel_links = kernel_links
        # Costs that the samples do not tell apart are put down to new tokens, and to bytes.
        self._prefill = _PrefillFit()
        self._decode = _Fit(ridge=(1e-6, 1e-3, 1e-3))
        self._copies = {link: _CopyFit() for link in MEASURED_LINKS}
        # By link: whether loads were ever about as fast as backups; backups in a row that were much faster, and how
        # many it takes to forget the loads.
        self._were_even = dict.fromkeys(MEASURED_LINKS, False)
        self._doubts = dict.fromkeys(MEASURED_LINKS, 0)
        self._patience = dict.fromkeys(MEASURED_LINKS, _PATIENCE)
        # By the place of the store.
        self.stores = tuple(StoreCosts(self._usual_bytes) for _ in STORE_LINKS)
        self._stream = _Fit(ridge=(1e-3, 1e-6, 1e-3))
        self._last_decode = (1.0, 0.0, 0.0)
        self._longest_prefill = 0.0

    def add_prefill(self, new_tokens: int, prefix_tokens: int, pairs: float, seconds: float) -> None:
        """Seconds of a prefill launch, without waits for loads. Over its requests: new tokens, cached tokens that
        they attend to, and pairs = sum(new * prefix + new * (new + 1) / 2), which attention multiplies."""
        self._prefill.add(self._prefill.features(1.0, new_tokens, prefix_tokens, pairs), seconds)
        self._longest_prefill = max(new_tokens, _DECAY * self._longest_prefill)

    @property
    def known_prefill(self) -> int:
        """The number of new tokens up to which predictions of prefills rest on samples: twice as many as were
        recently computed at once. Where only short prefills were measured, the cost of a long one is not known."""
        return int(2 * self._longest_prefill)

    def prefill_seconds(self, new_tokens: int, prefix_tokens: int, pairs: float) -> float | None:
        """fixed_s + token_s * new + context_s * prefix + pair_s * pairs: the start of a launch, the matrix products,
        the reads of cached KV, attention. None while no prefill was measured."""
        if not self._prefill.num_samples:
            return None
        return self._prefill.seconds(self._prefill.features(1.0, new_tokens, prefix_tokens, pairs))

    def add_decode(self, num_reqs: int, context_tokens: int, seconds: float) -> None:
        """Seconds of a decode launch of num_reqs requests. context_tokens: the tokens that they attend to, in all."""
        self._last_decode = (1.0, num_reqs, context_tokens)
        self._decode.add(self._last_decode, seconds)

    def decode_seconds(self) -> float | None:
        """Seconds of another decode launch like the last one: decode_s + decode_req_s * reqs + decode_context_s *
        context. A launch that fills a bubble is of that kind (Strata 4.3.3). None while no decode was measured."""
        return self._decode.seconds(self._last_decode) if self._decode.num_samples else None

    def add_copy(self, num_bytes: int, seconds: float, link: str) -> bool:
        """Seconds of an operation of a link, from its beginning to its end. Returns whether it was far faster than
        expected."""
        change = self._copies[link].add_copy(num_bytes, seconds)
        if link in BACKUP_LINKS.values():
            if change is _Change.SLOWER:
                # Loads have, too, it seems; the next one shows.
                self._copies[_OTHER_WAY[link]] = _CopyFit()
            # Where they were even, loads have become fast with backups, but only the first time that is believed.
            self._doubt_loads(_OTHER_WAY[link], num_bytes, seconds, _PATIENCE if change is _Change.FASTER else 1)
        return self._copies[link].num_fast > 0

    def _doubt_loads(self, link: str, num_bytes: int, backup_s: float, counts: int) -> None:
        """Forget what loads took if backups have long been much faster: what looks slow is not loaded, and would
        never be measured again. After each time it takes longer, and longer where loads never were as fast. counts:
        the backup, for so many."""
        fit = self._copies[link]
        is_faster = fit.num_samples and 0 < _SLOWER * backup_s < fit.seconds((1.0, num_bytes))
        self._were_even[link] |= fit.num_samples > 1 and not is_faster
        self._doubts[link] = self._doubts[link] + counts if is_faster else 0
        if self._doubts[link] > self._patience[link] * (1 if self._were_even[link] else _PATIENCE):
            self._copies[link] = _CopyFit()
            self._doubts[link] = 0
            self._patience[link] *= _PATIENCE

    def load_seconds(self, num_bytes: int, link: str = H2D) -> float | None:
        """load_latency_s + load_byte_s * bytes. While no load was measured on that link, as many as the other way;
        None while nothing was."""
        measured = [fit.seconds((1.0, num_bytes)) for fit in self._fits_of_loads(link, num_bytes)]
        if not measured:
            return None
        # The first one may have been slow by chance, but not again after it was doubted.
        is_doubtful = self._copies[link].num_samples == 1 and self._patience[link] == _PATIENCE
        return min(measured) if is_doubtful else measured[0]

    def _fits_of_loads(self, link: str, num_bytes: float) -> list[_CopyFit]:
        """What tells of loads of that size, the better first; of a kernel's loads only the fit that is faster."""
        fits = _informed((self._copies[link], self._copies[_OTHER_WAY[link]]), num_bytes)
        if link not in self._kernel_links:
            return fits
        return sorted(fits, key=lambda fit: fit.seconds((1.0, num_bytes)))[:1]

    def usual_load_seconds(self, link: str) -> float | None:
        """Of a load of USUAL_TOKENS; while no load was measured on a link, of as many the other way; None while
        nothing was."""
        fits = self._fits_of_loads(link, self._usual_bytes)
        return _mean_seconds(fits[:1], self._usual_bytes) if fits else None

    def there_and_back_seconds(self, num_tokens: int, load_link: str) -> float | None:
        """Seconds for which copying tokens from the device and loading them again takes the links, as a part of
        operations of USUAL_TOKENS. None while nothing was measured."""
        fits = self._fits_of_loads(load_link, self._usual_bytes)
        return 2 * _mean_seconds(fits, self._usual_bytes) * num_tokens / USUAL_TOKENS if fits else None

    @property
    def _usual_bytes(self) -> float:
        return USUAL_TOKENS * self._bytes_per_token

    def recompute_seconds(self, start: int, end: int) -> float | None:
        """Seconds that tokens [start, end) of a prompt add to a launch. None while no prefill was measured."""
        if not self._prefill.num_samples:
            return None
        _, token_s, _, pair_s = self._prefill.costs
        new = end - start
        return token_s * new + pair_s * (new * start + new * (new + 1) / 2)

    def add_stream(self, num_bytes: int, from_disk: int, seconds: float) -> None:
        """Seconds of all copies of a launch that streams, over all layers. from_disk: the part of num_bytes that came
        from disk."""
        self._stream.add((1.0, num_bytes, from_disk), seconds)

    def stream_seconds(self, num_bytes: int, from_disk: int) -> float | None:
        """stream_latency_s + stream_byte_s * bytes + stream_disk_byte_s * bytes from disk, per launch. None while no
        stream was measured."""
        return self._stream.seconds((1.0, num_bytes, from_disk)) if self._stream.num_samples else None

    def forget_storage(self) -> None:
        """Forget the samples of fetches and stores, because the storage has changed."""
        self.stores = tuple(StoreCosts(self._usual_bytes) for _ in STORE_LINKS)

    def prompt_seconds(self, start: int, end: int, chunk: int) -> float | None:
        """Seconds to compute tokens [start, end) of a prompt, in launches of up to `chunk` tokens. None while such
        launches have not been measured."""
        is_known = min(end - start, chunk) <= self.known_prefill
        return self.most_prompt_seconds(start, end, chunk) if is_known else None

    def most_prompt_seconds(self, start: int, end: int, chunk: int) -> float | None:
        """As `prompt_seconds`; where no launches of that length were measured, the seconds that shorter ones take
        together, _KNOWN_TIMES over: what attention to a long context takes may not be measured either. None while no
        prefill was measured."""
        if not self._prefill.num_samples:
            return None
        new = end - start
        times = 1 if min(new, chunk) <= self.known_prefill else _KNOWN_TIMES
        chunk = min(chunk, max(1, self.known_prefill))
        launches = -(-new // chunk)
        prefix = launches * start + chunk * launches * (launches - 1) // 2
        pairs = new * start + new * (new + 1) / 2
        return times * self._prefill.seconds(self._prefill.features(launches, new, prefix, pairs))

    def load_limit(self) -> LoadLimit | None:
        """Where expected load seconds reach expected compute seconds, in loaded tokens:

            loaded * load_token_s = fixed_s + token_s * new + pair_s * pairs,  load_token_s = bytes * load_byte_s.

        Strata 4.3.2 has a constant instead, loaded / new, profiled beforehand. Two small terms are left out:
        context_s, by which each loaded token hides a little of its own load, and the latency of the link. None while
        either side is not known, or if the cost of loads does not depend on their size.
        """
        fits = self._fits_of_loads(H2D, self._usual_bytes)
        load_token_s = self._bytes_per_token * fits[0].coefficients[1] if fits else 0.0
        if load_token_s == 0 or not self._prefill.num_samples:
            return None
        fixed_s, token_s, _, pair_s = self._prefill.costs
        return LoadLimit(fixed_s / load_token_s, token_s / load_token_s, pair_s / load_token_s)

    def state(self) -> dict[str, float]:
        """The coefficients, for display; 0 while they are not known."""
        names = {
            "fixed_s token_s context_s pair_s": self._prefill.costs,
            "decode_s decode_req_s decode_context_s": self._decode.coefficients,
            "load_latency_s load_byte_s": self._copies[H2D].coefficients,
            "peer_latency_s peer_byte_s": self._copies[P2D].coefficients,
            "fetch_latency_s fetch_byte_s": self.stores[0].fetch_coefficients,
            "far_fetch_latency_s far_fetch_byte_s": self.stores[1].fetch_coefficients,
            "stream_latency_s stream_byte_s stream_disk_byte_s": self._stream.coefficients,
        }
        return {name: c for each, found in names.items() for name, c in zip(each.split(), found)}
