"""report: one diagnosis as a page, a table, pictures, JSON, and scalars for a training log.

    save(diagnoses, Path("out/diagnosis"))         out/diagnosis.json, .md, and .html where the extra `report` is installed
    html(diagnoses, tokenizer=...)                 the page: one file, works from a disk, loads nothing
    pictures(diagnoses, Path("out/plots"))         each plot as PNG, without a browser
    table(...), markdown(...)                      for the terminal, and for a pull request
    log_wandb(run, ...), log_tensorboard(w, ...)   into a run that the trainer has open

Everything is made from the diagnosis' own JSON (`Diagnosis.to_dict`), so a page can be made again from a file. What is printed
always states direction, tokens, sampling and stack: a KL without its stack cannot be compared with anyone's.
"""

from r3.report.documents import load as load
from r3.report.documents import to_json as to_json
from r3.report.loggers import log_tensorboard as log_tensorboard
from r3.report.loggers import log_wandb as log_wandb
from r3.report.loggers import scalars as scalars
from r3.report.saving import beside as beside
from r3.report.saving import html as html
from r3.report.saving import missing as missing
from r3.report.saving import pictures as pictures
from r3.report.saving import require_packages as require_packages
from r3.report.saving import save as save
from r3.report.table import COLUMNS as COLUMNS
from r3.report.table import markdown as markdown
from r3.report.table import notes as notes
from r3.report.table import rows as rows
from r3.report.table import table as table
