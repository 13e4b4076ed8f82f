//! Kept-alive connections to one server. The last one given back is the first taken again.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use tokio::net::TcpStream;

use super::RequestError;
use crate::wire::message::{MessageReader, Progress, Side, StartLine};
use crate::wire::socket::{ReadError, read_some, set_options, write_pieces};

/// One connection: requests out, answers in, one after the other.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    reader: MessageReader,
}

impl Connection {
    /// Writes a request, its pieces one behind the other.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn send<const N: usize>(&mut self, pieces: [IoSlice<'_>; N]) -> io::Result<()> {
        self.reader.reset();
        write_pieces(&mut self.stream, pieces).await
    }

    /// Reads what has come of the answer and hands on the pieces of its body.
    ///
    /// # Errors
    /// [`ReadError`], after which the connection is of no use.
    pub async fn read_some(&mut self, on_body: impl FnMut(&StartLine, &[u8])) -> Result<Progress, ReadError> {
        read_some(&mut self.stream, &mut self.reader, on_body).await
    }

    /// The answer's status; 0 before its head has come.
    pub fn status(&self) -> u16 {
        self.reader.start_line().status()
    }

    /// A header of the answer, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.reader.header(name)?).ok()
    }

    /// Whether the server has neither closed it nor said anything since its last answer.
    fn is_quiet(&self) -> bool {
        let read = self.stream.try_read(&mut [0]);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// The pool. It never holds more connections than were in use at once.
#[derive(Debug)]
pub struct Connections {
    addresses: Vec<SocketAddr>,
    authority: String,
    idle: Mutex<Vec<Connection>>,
}

impl Connections {
    /// An empty pool.
    pub fn new(addresses: Vec<SocketAddr>, authority: String) -> Self {
        Self { addresses, authority, idle: Mutex::default() }
    }

    /// An idle connection, or a new one. Idle ones that the server has closed meanwhile are dropped: nothing was written
    /// to them yet, and a request is never sent twice.
    ///
    /// # Errors
    /// No connection can be made.
    pub async fn take(&self) -> Result<Connection, RequestError> {
        while let Some(connection) = self.take_idle() {
            if connection.is_quiet() {
                return Ok(connection);
            }
        }
        let failed = |source| RequestError::Connect { authority: self.authority.clone(), source };
        let stream = TcpStream::connect(self.addresses.as_slice()).await.map_err(failed)?;
        set_options(&stream).map_err(failed)?;
        Ok(Connection { stream, reader: MessageReader::new(Side::Response) })
    }

    /// Takes a connection back whose answer was read to its end.
    pub fn give_back(&self, connection: Connection) {
        if !connection.reader.closes() {
            self.lock().push(connection);
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        self.lock().pop()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
