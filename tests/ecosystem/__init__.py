"""Real client software on opened models, run as scripts in an environment of its own: ``make ecosystem``."""
