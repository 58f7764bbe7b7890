"""Bytes against drift: `mfs` beside every delta codec that could be run or re-expressed.

Each file that says how a peer works names what was published and where this differs from it. All bytes count: codes,
scales, counts of what was kept, embeddings, norms; of `auto` also the headers of its files. Random masks cost the
eight bytes of their seed.
"""
