// How the targets cut their input. Included by each, since a fuzz target is one file.

/// What comes before the first byte 0xff is lengths of pieces, used in turn; the rest is what is cut. Without that byte
/// everything is, byte by byte, so that plain files can be seeds.
fn pieces(input: &[u8]) -> (&[u8], Vec<&[u8]>) {
    let (lengths, whole) = match input.iter().position(|&byte| byte == 0xff) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (&[][..], input),
    };
    let lengths = if lengths.is_empty() { &[1][..] } else { lengths };
    let (mut cut, mut rest) = (Vec::new(), whole);
    // Past so many pieces one more teaches nothing.
    for &length in lengths.iter().cycle().take(2_000) {
        let (piece, left) = rest.split_at(rest.len().min(length.into()));
        cut.push(piece);
        rest = left;
        if rest.is_empty() {
            break;
        }
    }
    cut.push(rest);
    (whole, cut)
}
