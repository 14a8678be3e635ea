"""Run the command line on a tiny random model of every architecture that transformers can build."""
