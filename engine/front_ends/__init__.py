"""Several front ends before one fleet of cores: see README.md."""
