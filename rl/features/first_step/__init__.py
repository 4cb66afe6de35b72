"""One step of a run with a verdict on each part of it (`run.mode=check`)."""
