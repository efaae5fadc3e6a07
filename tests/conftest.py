"""What every test shares."""

import os

from hypothesis import settings

# Reproducible by default; HYPOTHESIS_PROFILE=explore looks for new cases.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
