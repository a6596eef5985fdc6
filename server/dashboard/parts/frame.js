// Work that is worth doing once for each picture on the screen.

/** A function that has `act` called before the next frame, however often it is called itself. */
export function oncePerFrame(act) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      act();
    });
  };
}
