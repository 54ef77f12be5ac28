"""What tests ask a page in a browser."""

# What one sees that lies beyond the window, or beyond the drawing it is in, by more than a pixel. What scrolls by itself may go
# on, but then what it scrolls in lies within. A reader opens what is closed at first; plotly measures texts where no one sees.
BEYOND = """
const seen = (each) => each.checkVisibility({checkVisibilityCSS: true}) && !each.closest('[id*=tester]');
const width = document.documentElement.clientWidth, found = [];
for (const each of [...document.querySelectorAll('body *, svg text')].filter(seen)) {
  const inside = each.parentElement.closest('.scroll');
  const own = each.getBoundingClientRect(), drawing = each.tagName === 'text' ? each.ownerSVGElement : null;
  const right = drawing ? drawing.getBoundingClientRect().right : width, left = drawing?.getBoundingClientRect().left ?? 0;
  if (own.width && (drawing || !inside) && (own.left < left - 1 || own.right > right + 1))
    found.push(`${each.tagName} ${each.textContent.slice(0, 60)}: ${own.left} to ${own.right}, of ${left} to ${right}`);
}
return found;
"""
