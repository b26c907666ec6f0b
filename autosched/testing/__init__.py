"""What tests of schedules need: see the modules. Nothing here is imported by ``import autosched``."""
