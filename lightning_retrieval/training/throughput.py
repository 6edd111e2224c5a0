"""Images per second, from the end of a training step to the end of the next."""

import time


class Throughput:
    """Measures the throughput of consecutive steps, in images per second."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self.measured = 0  # steps since the last restart whose throughput is known

    def restart(self) -> None:
        """Exclude the time from the previous step to the end of the next one, for example because of a validation."""
        self._last_end = None
        self.measured = 0

    def step(self, images: int) -> float | None:
        """Images per second since the end of the previous step; None for the first step after a restart.

        Args:
            images: images of the step that ends now.
        """
        now = time.perf_counter()
        last_end, self._last_end = self._last_end, now
        if last_end is None:
            return None
        self.measured += 1
        return images / (now - last_end)
