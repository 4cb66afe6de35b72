"""Stopping a run in order: who may ask for it, and until when it may take."""
