"""What a response earns: `answers` judges its final answer, `grading` does so in isolation, `rewards` composes.

Nothing heavy is imported here: math-verify and sympy live in the grading workers, the BLEU library where it is used.
"""
