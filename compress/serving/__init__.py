"""Run packed checkpoints in serving engines, by the modules that transformers runs."""
