//! HTTP/1.1 with as little work for a message as there can be: what the load generators send and read with.
//!
//! Knows framing and sockets, and no meaning of a message. [`message`] reads, [`socket`] moves bytes; on top of them are
//! [`crate::client`] and [`crate::overhead`].

pub mod message;
pub mod socket;
