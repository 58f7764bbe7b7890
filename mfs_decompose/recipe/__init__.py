"""How to decompose, as a strict YAML document: the schema, the presets, and loading with overrides.

Free of torch. `load_recipe` is the way in; `choose` says which codec a tensor gets.
"""
