//! Moves one application's bytes between its TCP socket and a stream, with TCP's semantics.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    future::Future,
    io::{self, Read},
    net::{Shutdown, TcpStream},
    pin::pin,
    rc::Rc,
};

use bytes::Bytes;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};
use vtl_proto::mux::ResetCode;

use super::{
    records::{self, Records},
    stream::{Broken, Receiver, Sender},
    wire, words,
};
use crate::{
    broker::set_linger,
    urgent::{self, Ahead},
};

/// Bytes for an application that does not read, before the stream is left alone and its flow
/// control stops the peer.
const MOST_HELD: usize = 4 << 20;
/// The same while the tunnel's flows together hold [`MOST_HELD_TOGETHER`].
const LITTLE_HELD: usize = 64 << 10;
const MOST_HELD_TOGETHER: usize = 128 << 20;

/// What the flows of a tunnel share.
#[derive(Default)]
pub(super) struct Meter {
    pub(super) flows: Cell<usize>,
    /// Bytes of applications, to and from the peer, and the streams' beginnings.
    pub(super) sent: Cell<u64>,
    pub(super) received: Cell<u64>,
    /// Bytes that wait for applications.
    held: Cell<usize>,
    /// A first flow has come, or the last one has gone.
    pub(super) changed: Notify,
}

/// Counts one flow as long as it lives.
pub(super) struct Counted(Rc<Meter>);

impl Counted {
    pub(super) fn new(meter: &Rc<Meter>) -> Self {
        meter.flows.set(meter.flows.get() + 1);
        meter.changed.notify_one();
        Self(Rc::clone(meter))
    }

    /// Bytes of the stream that are no application's.
    pub(super) fn said(&self, n: usize) {
        add(&self.0.sent, n);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.flows.set(self.0.flows.get() - 1);
        self.0.changed.notify_one();
    }
}

fn add(cell: &Cell<u64>, n: usize) {
    cell.set(cell.get() + n as u64);
}

/// Bytes of one flow that wait for its application, as part of the meter.
struct Holding<'a> {
    meter: &'a Meter,
    own: usize,
}

impl Holding<'_> {
    fn set(&mut self, now: usize) {
        self.meter.held.set(self.meter.held.get() - self.own + now);
        self.own = now;
    }

    fn has_room(&self) -> bool {
        let most = match self.meter.held.get() < MOST_HELD_TOGETHER {
            true => MOST_HELD,
            false => LITTLE_HELD,
        };
        self.own < most
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// vtld's end of an application's connection. Dropped before both directions have come to their
/// true ends, it is reset, also where the end of one was passed on.
pub(super) struct App {
    socket: AsyncFd<TcpStream>,
    done: Cell<bool>,
    /// What must live as long.
    _guard: Option<Box<dyn Any + Send>>,
}

impl App {
    /// Of a socket that does not block.
    pub(super) fn new(socket: TcpStream, guard: Option<Box<dyn Any + Send>>) -> io::Result<Self> {
        Ok(Self {
            socket: wire::watch(socket)?,
            done: Cell::new(false),
            _guard: guard,
        })
    }

    /// Waits for the outcome of its connect.
    pub(super) async fn connected(&self) -> io::Result<()> {
        wire::connected(&self.socket).await
    }
}

impl Drop for App {
    fn drop(&mut self) {
        if !self.done.get() {
            set_linger(self.socket.get_ref(), true);
        }
    }
}

/// What reading from an application gave.
enum Got {
    Record(Bytes),
    End,
}

thread_local! {
    /// One for all flows: an idle one shall have no buffer.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; records::PREFIX + records::LONGEST]);
}

/// Reads what is there as one record.
fn read(mut socket: &TcpStream) -> io::Result<Got> {
    SCRATCH.with_borrow_mut(|scratch| match urgent::ahead(socket)? {
        Ahead::End => Ok(Got::End),
        Ahead::Urgent => {
            let mut byte = [0];
            socket.read_exact(&mut byte)?;
            Ok(Got::Record(Bytes::copy_from_slice(
                &records::urgent_record(byte[0]),
            )))
        }
        Ahead::Bytes => {
            let n = socket.read(&mut scratch[records::PREFIX..])?;
            if n == 0 {
                return Ok(Got::End);
            }
            scratch[..records::PREFIX].copy_from_slice(&records::prefix(n));
            Ok(Got::Record(Bytes::copy_from_slice(
                &scratch[..records::PREFIX + n],
            )))
        }
    })
}

/// From the application to the peer, up to the application's end.
async fn up(app: &App, sender: &mut Sender, meter: &Meter) -> Result<(), Broken> {
    loop {
        let got = app.socket.async_io(Interest::READABLE, read).await;
        match got.map_err(|_| Broken::App)? {
            Got::Record(record) => {
                add(&meter.sent, record.len() - records::PREFIX);
                sender.write(record).await?;
            }
            Got::End => {
                return sender.finish().await;
            }
        }
    }
}

/// From the peer to the application, up to the peer's end.
async fn down(app: &App, receiver: &mut Receiver, meter: &Meter) -> Result<(), Broken> {
    let mut records = Records::default();
    let mut holding = Holding { meter, own: 0 };
    let mut ended = false;
    loop {
        while records.held() > 0 {
            let write = |socket: &TcpStream| records.write_to(socket);
            match app.socket.try_io(Interest::WRITABLE, write) {
                Ok(n) => add(&meter.received, n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Broken::App),
            }
        }
        holding.set(records.held());
        if ended && records.held() == 0 {
            let socket = app.socket.get_ref();
            // From here on the end that the application sees is the true one.
            set_linger(socket, false);
            let _ = socket.shutdown(Shutdown::Write);
            return Ok(());
        }
        let may_read = !ended && holding.has_room();
        let mut next = tokio::select! {
            read = receiver.read(), if may_read => Some(read),
            writable = app.socket.writable(), if records.held() > 0 => {
                // Readiness stays until a write is refused.
                writable.map_err(|_| Broken::App)?.retain_ready();
                None
            }
        };
        // As much as has come, up to what a write takes.
        while let Some(read) = next {
            match read? {
                Some(bytes) => {
                    records.push(bytes);
                    if receiver.ends_by_record() && records.is_whole(true) {
                        ended = true;
                        break;
                    }
                }
                None if records.is_whole(receiver.ends_by_record()) => {
                    ended = true;
                    break;
                }
                None => return Err(Broken::Reset(ResetCode::Rst)),
            }
            next = match records.held() < records::LONGEST {
                true => receiver.read_now().await,
                false => None,
            };
        }
    }
}

/// Both directions, until both have ended.
async fn both(
    up: impl Future<Output = Result<(), Broken>>,
    down: impl Future<Output = Result<(), Broken>>,
    app: &App,
    stopped: impl Future<Output = Broken>,
    gone: impl Future<Output = Broken>,
) -> Result<(), Broken> {
    let (mut up, mut down, mut stopped) = (pin!(up), pin!(down), pin!(stopped));
    tokio::select! {
        result = &mut up => {
            result?;
            tokio::select! {
                result = &mut down => result,
                () = wire::broken(&app.socket) => Err(Broken::App),
                broken = &mut stopped => Err(broken),
            }
        }
        result = &mut down => {
            result?;
            tokio::select! {
                result = &mut up => result,
                broken = &mut stopped => Err(broken),
                broken = gone => Err(broken),
            }
        }
        broken = &mut stopped => Err(broken),
    }
}

/// Waits until the peer's application has accepted.
pub(super) async fn opened(receiver: &mut Receiver) -> Result<(), Broken> {
    let mut answer = [0];
    receiver.read_exact(&mut answer).await?;
    match answer {
        [words::OPENED] => Ok(()),
        [words::RESET] => {
            receiver.read_exact(&mut answer).await?;
            let code = ResetCode::from_wire(answer[0].into());
            Err(Broken::Reset(code))
        }
        _ => Err(Broken::Nonsense),
    }
}

/// Carries a flow to its end. `waits`: the peer has not accepted yet, but the application's bytes
/// may go.
pub(super) async fn carry(
    app: App,
    mut sender: Sender,
    mut receiver: Receiver,
    waits: bool,
    counted: Counted,
) -> Result<(), Broken> {
    let meter = &*counted.0;
    let (stopped, gone) = (sender.stopped(), sender.gone());
    let down = async {
        if waits {
            opened(&mut receiver).await?;
        }
        down(&app, &mut receiver, meter).await
    };
    let result = both(up(&app, &mut sender, meter), down, &app, stopped, gone).await;
    if result.is_ok() {
        app.done.set(true);
    } else {
        sender.reset(ResetCode::Rst);
        receiver.stop(ResetCode::Rst);
    }
    result
}
