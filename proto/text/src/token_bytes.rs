//! What bytes a token's spelling in a vocabulary stands for.
//!
//! Byte-level vocabularies spell every byte as a printable character (GPT-2's table); SentencePiece's spell a space as U+2581 and
//! single bytes as `<0xE2>`. Caller: [`Tokenizer::token_bytes`](crate::Tokenizer::token_bytes).

/// Bytes of a spelling in GPT-2's alphabet; a character outside of it is itself.
pub(crate) fn of_byte_level(spelling: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(spelling.len());
    for character in spelling.chars() {
        match byte_of(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// Bytes of a spelling in a SentencePiece vocabulary.
pub(crate) fn of_sentence_piece(spelling: &str, byte_fallback: bool) -> Vec<u8> {
    let hex = spelling.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    let byte =
        hex.filter(|hex| hex.len() == 2 && byte_fallback).and_then(|hex| u8::from_str_radix(hex, 16).ok());
    byte.map_or_else(|| spelling.replace('\u{2581}', " ").into_bytes(), |byte| vec![byte])
}

/// Printable Latin-1 characters are their own bytes; the other 68 bytes follow from U+0100 on, in order.
fn byte_of(character: char) -> Option<u8> {
    let is_own = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(|&byte| is_own(byte)),
        code => (0..=u8::MAX).filter(|&byte| !is_own(byte)).nth(code as usize - 0x100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let own = (0x21..=0x7eu32).chain(0xa1..=0xac).chain(0xae..=0xff);
        let spelled: String = own.chain(0x100..=0x143).filter_map(char::from_u32).collect();
        let mut bytes = of_byte_level(&spelled);
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
    }

    #[test]
    fn spellings_stand_for_what_they_were_cut_from() {
        assert_eq!(of_byte_level("\u{120}the\u{10a}"), b" the\n");
        assert_eq!(of_byte_level("\u{e2}\u{124}\u{b0}"), [0xe2, 0x82, 0xb0]);
        assert_eq!(of_byte_level("<\u{4e2d}>"), "<\u{4e2d}>".as_bytes());
        assert_eq!(of_sentence_piece("\u{2581}the", true), b" the");
        assert_eq!(of_sentence_piece("<0xE2>", true), [0xe2]);
        assert_eq!(of_sentence_piece("<0xE2>", false), b"<0xE2>");
        assert_eq!(of_sentence_piece("<0x\u{e9}>", true), "<0x\u{e9}>".as_bytes());
    }
}
