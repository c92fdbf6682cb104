"""Reports for people: read plans and journals, decide nothing."""

from autoshard.records.words import rules_in_words as rules_in_words
from autoshard.report.describe import describe as describe
from autoshard.report.explain import explain as explain
