"""Incremental search for stop strings in the text of a sample."""


class StopString:
    """A text that ends samples, prepared for the search of Knuth, Morris and Pratt (https://doi.org/10.1137/0206024),
    which reads every character once.

    text: not empty.
    borders: for each prefix, the length of its longest proper prefix that is also its suffix.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0]
        for character in text[1:]:
            length = self.borders[-1]
            while length and text[length] != character:
                length = self.borders[length - 1]
            self.borders.append(length + (text[length] == character))


class StopSearch:
    """The state of the search for one stop string in one text.

    num_matched: length of the longest suffix of the text so far that is a prefix of the stop string.
    """

    def __init__(self, stop: StopString) -> None:
        self.stop = stop
        self.num_matched = 0

    def find(self, text: str, num_unstopped: int) -> int | None:
        """Returns how many characters of `text`, which continues the text searched so far, end with the stop string.

        None if it does not end in `text`, or only within the first `num_unstopped` characters.
        """
        stop, borders = self.stop.text, self.stop.borders
        place = 0
        while place < len(text):
            if not self.num_matched and (place := text.find(stop[0], place)) < 0:
                return None
            while self.num_matched and stop[self.num_matched] != text[place]:
                self.num_matched = borders[self.num_matched - 1]
            self.num_matched += stop[self.num_matched] == text[place]
            place += 1
            if self.num_matched == len(stop):
                if place > num_unstopped:
                    return place
                self.num_matched = borders[-1]
        return None
