"""The family artifact `mfs.family/1`: what is on disk, how it is written, read and checked (docs/format.md)."""
