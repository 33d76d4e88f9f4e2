"""Verdicts for runs made by anybody with any framework, from a table of their losses."""

from qkflow.judge.judgement import Judgement, judge

__all__ = ["Judgement", "judge"]
