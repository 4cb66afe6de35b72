"""Rules that end points of a sweep before their last step."""
