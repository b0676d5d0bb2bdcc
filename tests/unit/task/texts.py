"""Small texts in folders."""

from anyformer.task.base import generator


def document(number, words=80):
    picks = generator("text", number).random(words) * 30
    return " ".join(f"{number}.{int(pick)}" for pick in picks)


def write(root, count, start=0):
    for number in range(start, start + count):
        path = root / f"part{number % 7}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(document(number))
    return str(root)
