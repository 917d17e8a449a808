//! How fast bytes go through a session: `goodput recv [PORT]` at one host, `goodput send ADDRESS
//! SECONDS [PORT]` at the other. The daemon's socket is `$VTL_SOCKET`. The receiver reads in place,
//! checks each packet's first four bytes against a counter, and prints one JSON line a session.

use std::{
    env,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use vtl::{Mode, Socket, control::socket_path};

const PORT: u16 = 9254;
/// The data are counters below this prime, four bytes each: 128 KiB that stay in the cache, as with
/// iperf3, and do not repeat in step with packets or rings.
const PERIOD: u64 = 32_749;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let port = |i: usize| arg(i).map_or(Ok(PORT), str::parse);
    match arg(0) {
        Some("recv") => receive(port(1)?),
        Some("send") => {
            let to: IpAddr = arg(1).ok_or("send to whom?")?.parse()?;
            let seconds = arg(2).unwrap_or("5").parse()?;
            send(
                SocketAddr::new(to, port(3)?),
                Duration::from_secs_f64(seconds),
            )
        }
        _ => Err("usage: goodput recv [PORT] | goodput send ADDRESS SECONDS [PORT]".into()),
    }
}

fn send(to: SocketAddr, time: Duration) -> Result<(), Box<dyn std::error::Error>> {
    let mut socket = Socket::init(Mode::Initiator, to, &socket_path(None))?;
    let block: Vec<u8> = (0..PERIOD).flat_map(|n| (n as u32).to_ne_bytes()).collect();
    let start = Instant::now();
    while start.elapsed() < time {
        let mut rest = &block[..];
        while !rest.is_empty() {
            let n = socket.send_data(rest)?;
            rest = &rest[n..];
        }
    }
    Ok(socket.close()?)
}

fn receive(port: u16) -> Result<(), Box<dyn std::error::Error>> {
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
    let mut socket = Socket::init(Mode::Responder, any, &socket_path(None))?;
    socket.validate()?;
    let (mut bytes, mut wrong) = (0_u64, 0_u64);
    let mut start: Option<Instant> = None;
    loop {
        let count = socket.recv_in_place(256, |packet| {
            let first = packet
                .first_chunk()
                .map(|b| u64::from(u32::from_ne_bytes(*b)));
            wrong += u64::from(first != Some(bytes / 4 % PERIOD));
            bytes += packet.len() as u64;
        })?;
        start.get_or_insert_with(Instant::now);
        if count == 0 {
            break;
        }
    }
    let seconds = start.map_or(0.0, |s| s.elapsed().as_secs_f64());
    let gbit = bytes as f64 * 8.0 / 1e9 / seconds;
    println!("{{\"bytes\":{bytes},\"seconds\":{seconds:.3},\"gbit\":{gbit:.3},\"wrong\":{wrong}}}");
    Ok(())
}
