"""Figures and page of the paper's analysis; make_paper.py puts them together."""
