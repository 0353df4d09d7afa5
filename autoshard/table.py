"""Tables of figures: made once of columns and rows, shown on terminals, in pages, in Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autoshard.core.errors import InvalidOptionError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: What its values are; the heading is the name and the unit.
        unit: Unit of its values; empty for none.
        text: Prints a value; None is printed as nothing.
        justify: Side on which values stand.
        min_width: Least width on terminals, in characters.
    """

    name: str
    unit: str = ""
    text: Callable[[Any], str] = str
    justify: Literal["left", "right"] = "left"
    min_width: int | None = None

    @property
    def heading(self) -> str:
        """Name and unit: `kernel ms`."""
        return f"{self.name} {self.unit}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Values in columns and rows. Consoles print it, templates of pages show its headings and lines.

    Attributes:
        columns: The columns. A name alone stands for a column of texts if it is the first, else of numbers.
        rows: Values of each row, one per column; texts of rich keep their colours on terminals.
        title: Heading.
        caption: Line below it, or above in pages.
        marked: Places of rows that are bold.
        is_boxed: Whether terminals show lines around columns.
        title_justify: Side on which terminals show title and caption.

    Raises:
        InvalidOptionError: If a row has more or fewer values than there are columns.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    caption: str = ""
    marked: Collection[int] = ()
    is_boxed: bool = False
    title_justify: Literal["left", "center"] = "left"

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InvalidOptionError(f"must have {len(self.columns)} cells each, got {len(row)}", field="rows")

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        columns: Sequence[tuple[Column | str, Callable[[Row], object]]],
        **settings: Any,
    ) -> Table:
        """A table with a row for each of some things.

        Args:
            rows: The things.
            columns: Columns, each with what it shows of a thing.
            settings: Attributes of the table besides.
        """
        values = tuple(tuple(value(row) for _, value in columns) for row in rows)
        return cls(columns=tuple(column for column, _ in columns), rows=values, **settings)

    def first(self, most: int, what: str) -> Table:
        """The table with its first rows, whose caption says how many it lacks.

        Args:
            most: Rows that it keeps.
            what: What one of the others is: `more table`.
        """
        left = len(self.rows) - most
        if left <= 0:
            return self
        others = f"{left:,} {what}{'s' if left > 1 else ''}; --json lists all"
        return replace(self, rows=self.rows[:most], caption=f"{self.caption} {others}".strip())

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the columns."""
        return tuple(column.heading for column in self._columns())

    @property
    def sides(self) -> tuple[str, ...]:
        """Side of each column on which its values stand: `left` or `right`."""
        return tuple(column.justify for column in self._columns())

    @property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        """The rows as they are printed."""
        columns = self._columns()
        return tuple(
            tuple("" if value is None else column.text(value) for column, value in zip(columns, row, strict=True))
            for row in self.rows
        )

    def records(self) -> list[dict[str, object]]:
        """The rows as JSON objects, by name and unit of the columns: `kernel_ms`."""
        names = [heading.replace(" ", "_") for heading in self.headings]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def to_markdown(self) -> str:
        """The table in Markdown, without title and caption."""
        rule = ["---:" if column.justify == "right" else "---" for column in self._columns()]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.headings, rule, *self.lines))

    def __rich__(self) -> RichTable:
        """The table as consoles print it."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title or None,
            caption=self.caption or None,
            title_justify=self.title_justify,
            caption_justify=self.title_justify,
            box=box.HEAVY_HEAD if self.is_boxed else None,
            pad_edge=self.is_boxed,
            show_header=any(self.headings),
            header_style="table.header" if self.is_boxed else "bold",
        )
        for column in self._columns():
            table.add_column(column.heading, justify=column.justify, overflow="fold", min_width=column.min_width)
        for number, (row, line) in enumerate(zip(self.rows, self.lines, strict=True)):
            cells = (value if isinstance(value, Text) else text for value, text in zip(row, line, strict=True))
            table.add_row(*cells, style="bold" if number in self.marked else None)
        return table

    def _columns(self) -> list[Column]:
        return [
            column if isinstance(column, Column) else Column(column, justify="right" if number else "left")
            for number, column in enumerate(self.columns)
        ]


def facts(rows: Iterable[tuple[str, object]], **settings: Any) -> Table:
    """Names with their values, without headings."""
    return Table(columns=(Column(""), Column("")), rows=tuple(rows), **settings)


def texts(*names: str) -> tuple[Column, ...]:
    """Columns of texts."""
    return tuple(map(Column, names))
