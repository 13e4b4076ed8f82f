//! Where log lines go: through a queue to a thread of their own. Whoever reads stderr may be slow, or read nothing at all, and then no
//! thread that serves may wait for it: lines beyond the queue's bound are left out and counted.
//!
//! Knows nothing of what a line says. Filled by `tracing`'s formatter, whole lines at a time; `main.rs` starts and ends it.

use std::io::{ErrorKind, Write};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::IntCounter;

/// Bytes of lines that may wait to be written: some three thousand of them. As much again may be being written.
const MOST_WAITING_BYTES: usize = 1 << 20;
/// How long lines are gathered after some have been written, so that a busy router wakes the writer a hundred times a second and not
/// with every line.
const GATHERING: Duration = Duration::from_millis(10);

/// Lines that are in no log since they were not taken fast enough. A process has one log, so there is one such counter.
static DROPPED: LazyLock<IntCounter> = LazyLock::new(|| {
    let help = "Log lines left out because stderr was not read fast enough, or not at all.";
    IntCounter::new("router_log_lines_dropped_total", help).expect("the name is a constant, and valid")
});

/// The counter of lines that were left out, to be registered.
#[must_use]
pub fn dropped_lines() -> IntCounter {
    DROPPED.clone()
}

/// Lines on their way to a thread that writes them.
#[derive(Debug)]
pub struct LogQueue {
    state: Mutex<State>,
    /// Lines have come for a writer that waits.
    came: Condvar,
    /// A batch has been written, or given up.
    written: Condvar,
    dropped: IntCounter,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    writer: Writer,
}

/// What the thread that writes is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Writer {
    /// Between two batches; it looks for more by itself.
    #[default]
    Gathering,
    /// It must be woken.
    Asleep,
    /// It has lines that may not be out yet.
    Writing,
}

impl LogQueue {
    /// A queue whose lines are written to `out`. After lines had to be left out and some could be written again, `report` is told how many.
    ///
    /// # Errors
    /// When the system has no thread for it.
    pub fn start(
        out: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> std::io::Result<Arc<Self>> {
        Self::counting(out, report, dropped_lines())
    }

    fn counting(
        out: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
        dropped: IntCounter,
    ) -> std::io::Result<Arc<Self>> {
        let (state, came, written) = (Mutex::default(), Condvar::new(), Condvar::new());
        let reported = dropped.get();
        let queue = Arc::new(Self { state, came, written, dropped });
        let writer = Arc::clone(&queue);
        let run = move || writer.write_for_ever(out, report, reported);
        std::thread::Builder::new().name("logs".into()).spawn(run)?;
        Ok(queue)
    }

    /// Adds a line, which ends in a line feed. Never waits.
    pub fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        if state.waiting.len() + line.len() > MOST_WAITING_BYTES {
            drop(state);
            self.dropped.inc();
            return;
        }
        state.waiting.extend_from_slice(line);
        if state.writer == Writer::Asleep {
            state.writer = Writer::Gathering;
            drop(state);
            self.came.notify_one();
        }
    }

    /// Waits until all lines are out, `limit` at most. Returns whether they are.
    pub fn flush(&self, limit: Duration) -> bool {
        let is_busy = |state: &mut State| state.writer == Writer::Writing || !state.waiting.is_empty();
        let waited = self.written.wait_timeout_while(self.lock(), limit, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_for_ever(&self, mut out: impl Write, report: impl Fn(u64), mut reported: u64) {
        let mut batch = Vec::new();
        loop {
            self.take(&mut batch);
            let left = write_out(&mut out, &batch);
            self.dropped.inc_by(memchr::memchr_iter(b'\n', left).count() as u64);
            let dropped = self.dropped.get();
            // Only after something has gone out: a line about lines that cannot be written would be another one of those.
            if left.is_empty() && dropped > reported {
                report(dropped - reported);
                reported = dropped;
            }
            batch.clear();
            self.lock().writer = Writer::Gathering;
            self.written.notify_all();
            std::thread::sleep(GATHERING);
        }
    }

    /// Waits for lines, and takes all there are; `batch`, which is empty, takes the next ones.
    fn take(&self, batch: &mut Vec<u8>) {
        let mut state = self.lock();
        while state.waiting.is_empty() {
            state.writer = Writer::Asleep;
            state = self.came.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.writer = Writer::Writing;
        std::mem::swap(&mut state.waiting, batch);
    }
}

/// Writes `lines`, and gives what could not be written.
fn write_out<'a>(out: &mut impl Write, mut lines: &'a [u8]) -> &'a [u8] {
    while !lines.is_empty() {
        match out.write(lines) {
            Ok(0) => break,
            Ok(count) => lines = &lines[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Another process that has the same pipe may have made it so.
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(GATHERING),
            Err(_) => break,
        }
    }
    lines
}

impl Write for &LogQueue {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Takes each batch once the test allows it, or refuses it.
    struct Reader {
        allowed: Receiver<std::io::Result<()>>,
        taken: Sender<Vec<u8>>,
    }

    impl Write for Reader {
        fn write(&mut self, lines: &[u8]) -> std::io::Result<usize> {
            self.allowed.recv().unwrap_or(Ok(()))?;
            let _ = self.taken.send(lines.to_vec());
            Ok(lines.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    struct Test {
        queue: Arc<LogQueue>,
        allow: Sender<std::io::Result<()>>,
        taken: Receiver<Vec<u8>>,
        reports: Receiver<u64>,
    }

    fn queue() -> Test {
        let ((allow, allowed), (taker, taken)) = (channel(), channel());
        let (reporter, reports) = channel();
        let report = move |dropped| reporter.send(dropped).unwrap_or_default();
        let dropped = IntCounter::new("dropped", "Dropped.").unwrap();
        let queue = LogQueue::counting(Reader { allowed, taken: taker }, report, dropped).unwrap();
        Test { queue, allow, taken, reports }
    }

    #[test]
    fn lines_beyond_the_bound_are_left_out_and_counted() {
        let Test { queue, allow, taken, reports } = queue();
        let line = [&[b'x'; 1_023][..], b"\n"].concat();
        for _ in 0..3 * MOST_WAITING_BYTES / line.len() {
            queue.push(&line);
        }
        let dropped = queue.dropped.get();
        assert!(dropped >= 1_024, "one bound waits and another is being written at most: {dropped}");
        assert!(!queue.flush(Duration::ZERO), "nobody has read anything");
        allow.send(Ok(())).unwrap();
        assert_eq!(reports.recv_timeout(LIMIT).unwrap(), dropped);
        drop(allow);
        assert!(queue.flush(LIMIT));
        let all: Vec<u8> = taken.try_iter().flatten().collect();
        assert_eq!(all.len() / line.len() + dropped as usize, 3 * 1_024);
        assert!(all.chunks(line.len()).all(|taken| taken == line), "whole lines in their order");
    }

    #[test]
    fn what_cannot_be_written_is_counted_and_reported_once_something_can() {
        let Test { queue, allow, taken, reports } = queue();
        allow.send(Err(ErrorKind::BrokenPipe.into())).unwrap();
        queue.push(b"lost\n");
        assert!(queue.flush(LIMIT), "nothing waits any more");
        assert_eq!((queue.dropped.get(), reports.try_recv().ok()), (1, None));
        allow.send(Ok(())).unwrap();
        queue.push(b"read\n");
        assert!(queue.flush(LIMIT));
        assert_eq!((taken.recv().unwrap(), reports.recv().unwrap()), (b"read\n".to_vec(), 1));
    }
}
