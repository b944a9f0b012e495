"""What a job will take, before it runs: `ember plan`. From the settings and a sample of the rows, or measured."""
