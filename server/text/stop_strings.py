"""StopString: a text that ends samples; StopSearch: how far the text of one sample has come in it."""


class StopString:
    """borders: of the first 1, 2, ... characters, how many at their end are also at their beginning, but not all.

    (Knuth, Morris and Pratt, https://doi.org/10.1137/0206024: so that no character of a text is looked at again.)
    """

    def __init__(self, text: str) -> None:
        """text: not empty."""
        self.text = text
        self.borders = [0]
        for character in text[1:]:
            length = self.borders[-1]
            while length and text[length] != character:
                length = self.borders[length - 1]
            self.borders.append(length + (text[length] == character))


class StopSearch:
    """num_begun: characters at the end of the text that begin the stop string, the most of them."""

    def __init__(self, stop: StopString) -> None:
        self.stop = stop
        self.num_begun = 0

    def find(self, text: str, num_unstopped: int) -> int | None:
        """How many characters of `text`, which follows what was searched before, end with the stop string.

        None: it does not end in there, or only within the first `num_unstopped`.
        """
        stop, borders = self.stop.text, self.stop.borders
        place = 0
        while place < len(text):
            if not self.num_begun and (place := text.find(stop[0], place)) < 0:
                return None
            while self.num_begun and stop[self.num_begun] != text[place]:
                self.num_begun = borders[self.num_begun - 1]
            self.num_begun += stop[self.num_begun] == text[place]
            place += 1
            if self.num_begun == len(stop):
                if place > num_unstopped:
                    return place
                self.num_begun = borders[-1]
        return None
