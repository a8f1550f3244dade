"""Time of a forward as a straight line in the number of its tokens, fitted while decoding."""

from __future__ import annotations


class LinearLatency:
    """Least squares of seconds on size, where older measurements fade: machines and contexts change.

    A measurement far above the line is taken for a stall and cut down. The slope is never negative; until two sizes
    were seen it is unknown and `slope_share` of the intercept is assumed.

    Args:
        fade: weight that a measurement keeps with every later one, in (0, 1].
        slope_share: assumed cost of one more token, as a share of a forward's fixed cost.
    """

    _STALL = 3.0

    def __init__(self, fade: float = 0.97, slope_share: float = 0.02) -> None:
        self._fade, self._share = fade, slope_share
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._n > 0

    def observe(self, size: float, seconds: float) -> None:
        """A forward of `size` tokens took so long."""
        if self.known:
            seconds = min(seconds, self._STALL * self.seconds(size))
        sums = (1.0, size, seconds, size * size, size * seconds)
        old = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (self._fade * o + s for o, s in zip(old, sums, strict=True))

    def seconds(self, size: float) -> float:
        """What the line says; 0 before the first measurement."""
        if not self.known:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        return max(0.0, mean_y + self._slope(mean_x, mean_y) * (size - mean_x))

    def _slope(self, mean_x: float, mean_y: float) -> float:
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-9 * max(1.0, mean_x * mean_x):
            return self._share * mean_y / (1 + self._share * mean_x)
        return max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
