//! How long a short message takes there and back: `echo serve [tcp]` at one host, `echo ping
//! ADDRESS COUNT [BYTES] [tcp] [slow]` at the other, `slow` with a pause before each message. With `tcp` both use the kernel's TCP, for comparison
//! and through hooks. Port 9253; the daemon's socket is `$VTL_SOCKET`. Prints one JSON line, in
//! microseconds.

use std::{
    env,
    error::Error,
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use vtl::{Mode, Socket, control::socket_path};

const PORT: u16 = 9253;
/// Maximum length of a message, bytes.
const MAX_MESSAGE: usize = 64 << 10;
/// Rounds that are not counted.
const WARM: usize = 200;
/// Pause before each round of `slow`: everything has gone to sleep by then.
const PAUSE: Duration = Duration::from_millis(5);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args: Vec<String> = env::args().skip(1).collect();
    let mut flag = |name: &str| {
        let before = args.len();
        args.retain(|a| a != name);
        before != args.len()
    };
    let (tcp, slow) = (flag("tcp"), flag("slow"));
    let arg = |i: usize| args.get(i).map(String::as_str);
    match arg(0) {
        Some("serve") => {
            let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), PORT);
            if tcp {
                let (stream, _) = TcpListener::bind(any)?.accept()?;
                stream.set_nodelay(true)?;
                serve(stream)
            } else {
                let mut socket = Socket::init(Mode::Responder, any, &socket_path(None))?;
                socket.validate()?;
                serve(socket)
            }
        }
        Some("ping") => {
            let to: IpAddr = arg(1).ok_or("ping whom?")?.parse()?;
            let to = SocketAddr::new(to, PORT);
            let count = arg(2).unwrap_or("10000").parse()?;
            let bytes = arg(3).map_or(Ok(64), str::parse)?;
            if tcp {
                let stream = TcpStream::connect(to)?;
                stream.set_nodelay(true)?;
                ping(stream, count, bytes, slow)
            } else {
                let socket = Socket::init(Mode::Initiator, to, &socket_path(None))?;
                ping(socket, count, bytes, slow)
            }
        }
        _ => Err("usage: echo serve [tcp] | echo ping ADDRESS COUNT [BYTES] [tcp] [slow]".into()),
    }
}

fn serve(mut socket: impl Read + Write) -> Result<(), Box<dyn Error>> {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let n = match socket.read(&mut buffer) {
            // The other side does not close in order.
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => return Ok(()),
            other => other?,
        };
        if n == 0 {
            return Ok(());
        }
        socket.write_all(&buffer[..n])?;
    }
}

fn ping(
    mut socket: impl Read + Write,
    count: usize,
    bytes: usize,
    slow: bool,
) -> Result<(), Box<dyn Error>> {
    let mut answer = vec![0; bytes.clamp(8, MAX_MESSAGE)];
    let mut times = Vec::with_capacity(count);
    for round in 0..WARM + count {
        let message: Vec<u8> = (0..answer.len()).map(|i| (i + round) as u8).collect();
        if slow {
            std::thread::sleep(PAUSE);
        }
        let start = Instant::now();
        socket.write_all(&message)?;
        socket.read_exact(&mut answer)?;
        times.push(start.elapsed());
        if answer != message {
            return Err("the answer is not what was sent".into());
        }
    }
    let mut times = times.split_off(WARM);
    times.sort_unstable();
    let at = |share: f64| {
        let index = (share * (count - 1) as f64) as usize;
        times[index].as_secs_f64() * 1e6
    };
    println!(
        "{{\"count\":{count},\"bytes\":{bytes},\"p50\":{:.1},\"p90\":{:.1},\"p99\":{:.1},\
         \"p999\":{:.1},\"max\":{:.1}}}",
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999),
        at(1.0)
    );
    Ok(())
}
