"""What `ember.run` needs of Hydra: with `run.py`, the only modules that import hydra or omegaconf."""
