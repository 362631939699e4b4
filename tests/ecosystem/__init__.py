"""Real client software on opened models, run as scripts."""
