"""The main job: a small GPT trained for real, killed in the middle of a save, and resumed.

``python -m ckptd.train.demo DIR`` runs it; ``ckptd demo`` starts that and shows the result.
"""
