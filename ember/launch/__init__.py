"""What `ember.run` needs of Hydra: the only modules that import hydra or omegaconf."""
