"""How one tensor of one variant is stored. Codecs compose into trees; each lives in one file.

An exact codec gives the variant's own bits back. A lossy codec stores a delta, in steps of falling weight
(directions of a low rank, entries of a row), so that one fit serves every size.
"""
