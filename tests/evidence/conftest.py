"""What tests of the measurements share."""

import pytest
from scipy import stats


@pytest.fixture
def few_draws(monkeypatch):
    """Intervals of 200 draws in place of thousands: for tests of what becomes of an interval, not of the interval."""
    bootstrap = stats.bootstrap

    def fewer(*arguments, n_resamples, **settings):
        return bootstrap(*arguments, n_resamples=min(n_resamples, 200), **settings)

    monkeypatch.setattr(stats, "bootstrap", fewer)
