//! The test vectors of `vectors/`, decoded by this crate and by C (`vectors.c`) from the same
//! header, and emitted again.
#![allow(non_snake_case)]

use std::{
    fmt::Write as _,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use vtl_proto::{
    frame::{self, FrameError, ResetCode, Side},
    layers::{Compression, Fec, FlowControl, Message, Nack, Ordering},
    wire::{Ack, Data, Extension, Header, MIN_PAYLOAD, Nego, Packet, WireError},
};

struct Vector {
    name: String,
    bytes: Vec<u8>,
    want: String,
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests"))
}

fn vectors(file: &str) -> Vec<Vector> {
    let text = std::fs::read_to_string(folder().join("vectors").join(file)).unwrap();
    let mut list: Vec<Vector> = Vec::new();
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (key, value) = line.split_once(' ').unwrap();
        let last = list.last_mut();
        match (key, last) {
            ("vector", _) => {
                list.push(Vector {
                    name: value.into(),
                    bytes: Vec::new(),
                    want: String::new(),
                });
            }
            ("hex", Some(vector)) => vector.bytes = unhex(value),
            ("want", Some(vector)) => vector.want = value.into(),
            _ => panic!("{file}: {line}"),
        }
    }
    assert!(list.len() > 10);
    list
}

fn unhex(text: &str) -> Vec<u8> {
    let text = text.trim_start_matches('-');
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "-".into();
    }
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn describe(packet: Result<Packet<'_>, WireError>) -> String {
    match packet {
        Ok(Packet::Data(data)) => describe_data("data", &data),
        Ok(Packet::Probe(data)) => describe_data("probe", &data),
        Ok(Packet::Ack(ack)) => describe_ack(&ack),
        Ok(Packet::Nego(nego)) => describe_nego("nego", &nego),
        Ok(Packet::NegoAck(nego)) => describe_nego("nego_ack", &nego),
        Ok(Packet::NegoNack(nego)) => describe_nego("nego_nack", &nego),
        Ok(Packet::Close(header)) => describe_header("close", &header),
        Ok(Packet::Size(size)) => format!(
            "{} zeros={} answers={}",
            describe_header("size", &size.header),
            size.zeros,
            size.answers
        ),
        Err(error) => format!("error {}", class(error)),
    }
}

fn class(error: WireError) -> &'static str {
    match error {
        WireError::Truncated { .. } => "truncated",
        WireError::Version(_) => "version",
        WireError::Type(_) => "type",
        WireError::Length { .. } => "length",
        WireError::Payload(_) => "payload",
        WireError::Bitmap(_) => "bitmap",
        WireError::Extension(_) => "extension",
        WireError::Field(_) => "field",
        WireError::Checksum => "checksum",
    }
}

fn describe_header(kind: &str, header: &Header) -> String {
    let Header {
        flags,
        gid,
        sid,
        token,
    } = header;
    format!("{kind} flags={flags} gid={gid} sid={sid} token={token}")
}

fn describe_data(kind: &str, data: &Data<'_>) -> String {
    let Data {
        header,
        seq,
        xid,
        ts,
        payload,
    } = data;
    let header = describe_header(kind, header);
    format!(
        "{header} seq={seq} xid={xid} ts={ts} payload={}",
        hex(payload)
    )
}

fn describe_ack(ack: &Ack<'_>) -> String {
    let Ack {
        header,
        cum,
        limit,
        received,
        echo_seq,
        echo_xid,
        echo_ts,
        dups,
        skip,
        bitmap,
    } = ack;
    let header = describe_header("ack", header);
    format!(
        "{header} cum={cum} limit={limit} received={received} echo_seq={echo_seq} \
         echo_xid={echo_xid} echo_ts={echo_ts} dups={dups} skip={skip} bitmap={}",
        hex(bitmap)
    )
}

fn describe_nego(kind: &str, nego: &Nego<'_>) -> String {
    let header = describe_header(kind, &nego.header);
    let Nego {
        token,
        peer_token,
        sid,
        ring_slots,
        max_payload,
        port,
        services,
        reason,
        ticket,
        ..
    } = nego;
    let gids: Vec<_> = nego.gids.iter().map(u16::to_string).collect();
    let gids = if gids.is_empty() {
        "-".into()
    } else {
        gids.join(",")
    };
    let params: Vec<_> = nego
        .params
        .iter()
        .map(|p| format!("{}.{}={}", p.graft, p.index, p.value))
        .collect();
    let params = if params.is_empty() {
        "-".into()
    } else {
        params.join(",")
    };
    let extensions: String = nego.extensions.iter().map(describe_extension).collect();
    format!(
        "{header} own_token={token} peer_token={peer_token} own_sid={sid} \
         ring_slots={ring_slots} max_payload={max_payload} port={port} services={services} \
         reason={reason} gids={gids} ticket={}/{}/{} params={params}{extensions}",
        ticket.time, ticket.mac, ticket.sid
    )
}

fn describe_extension(extension: Extension<'_>) -> String {
    let critical = if extension.critical { "!" } else { "" };
    format!(
        " extension={}{critical}:{}",
        extension.kind,
        hex(extension.value)
    )
}

fn describe_flows(mut payload: &[u8]) -> String {
    let mut list = Vec::new();
    while !payload.is_empty() {
        match frame::Frame::take(&mut payload) {
            Ok(frame) => list.push(describe_flow(&frame)),
            Err(FrameError::Truncated) => return "error truncated".into(),
            Err(FrameError::UnknownType(_)) => return "error type".into(),
            Err(FrameError::BodyLength { .. }) => return "error length".into(),
            Err(FrameError::Overflow) => return "error overflow".into(),
            Err(FrameError::Magic) => return "error magic".into(),
        }
    }
    if list.is_empty() {
        "-".into()
    } else {
        list.join("; ")
    }
}

/// A carrier as its opener and number.
fn named(carrier: frame::CarrierId) -> String {
    let opener = if carrier.opener == Side::Local {
        "l"
    } else {
        "p"
    };
    format!("{opener}{}", carrier.number)
}

/// HELLO, or PREFER.
fn describe_hello(frame: &frame::Frame<'_>) -> String {
    use frame::Frame;
    match *frame {
        Frame::Hello {
            carrier,
            tag,
            tls,
            path,
            gateways,
            layers,
        } => {
            let tls = if tls { " tls" } else { "" };
            let gateways = if gateways { " gateways" } else { "" };
            let path = match path {
                0 => String::new(),
                path => format!(" path={path}"),
            };
            let layers = if layers { " layers" } else { "" };
            let what = format!("hello tag={tag}{tls}{path}{gateways}{layers}");
            format!("{} {what}", named(carrier))
        }
        Frame::Prefer {
            carrier,
            tag,
            bbr,
            asks,
            spread,
        } => {
            let bbr = if bbr { " bbr" } else { "" };
            let asks = if asks { " asks" } else { "" };
            let spread = spread.map_or(String::new(), |by| format!(" spread={by}"));
            format!("{} prefer tag={tag}{bbr}{asks}{spread}", named(carrier))
        }
        _ => unreachable!("neither"),
    }
}

fn describe_flow(frame: &frame::Frame<'_>) -> String {
    use frame::Frame;
    let mark = |set: bool, mark: &'static str| if set { mark } else { "" };
    match *frame {
        Frame::Chunk {
            flow,
            offset,
            bytes,
            fin,
            urgent,
        } => format!(
            "{flow} chunk offset={offset} bytes={}{}{}",
            hex(bytes),
            mark(fin, " fin"),
            mark(urgent, " urgent")
        ),
        Frame::Confirm {
            flow,
            offset,
            fin,
            limit,
            tolerant,
        } => format!(
            "{flow} confirm offset={offset} limit={limit}{}{}",
            mark(fin, " fin"),
            mark(tolerant, " tolerant")
        ),
        Frame::Loses { flow, from, passed } => {
            format!("{flow} loses from={from} passed={passed}")
        }
        Frame::Attach { flow, run } => format!(
            "{flow} attach number={} position={} offset={}",
            run.number, run.position, run.offset
        ),
        Frame::Attached { flow, number } => format!("{flow} attached number={number}"),
        Frame::Reset { flow, code } => {
            let code = u8::from(code == ResetCode::Violation);
            format!("{flow} reset code={code}")
        }
        Frame::Reject { flow } => format!("{flow} reject"),
        Frame::Broken { carrier } => {
            format!("{} broken", named(carrier))
        }
        Frame::Hello { .. } | Frame::Prefer { .. } => describe_hello(frame),
        Frame::Gateway { address } => format!("gateway address={address}"),
        Frame::Figures(figures) => {
            let loss = figures
                .loss_ppm
                .map_or("?".to_owned(), |loss| loss.to_string());
            format!(
                "figures rate={} at_least={} min_rtt={} loss={loss} burst={} packets={}",
                figures.rate,
                u8::from(figures.at_least),
                figures.min_rtt_us,
                figures.burst_milli,
                figures.packets
            )
        }
        Frame::Addresses(addresses) if addresses.iter().next().is_none() => {
            "addresses -".to_owned()
        }
        Frame::Addresses(addresses) => {
            let all: Vec<_> = addresses
                .iter()
                .map(|address| address.to_string())
                .collect();
            format!("addresses {}", all.join(","))
        }
        Frame::Ask { kind, seals } => {
            let seals = if seals { " seals" } else { "" };
            format!("ask kind={kind}{seals}")
        }
        Frame::Grant {
            kind,
            port,
            token,
            crypto,
        } => format!(
            "grant kind={kind} port={port} token={token} crypto={}",
            hex(&crypto)
        ),
        Frame::Refuse { kind } => format!("refuse kind={kind}"),
        Frame::Layers { message } => format!("layers {}", hex(message)),
        Frame::Certificate { bytes } => format!("certificate {}", hex(bytes)),
    }
}

#[test]
fn packets__rust() {
    for Vector { name, bytes, want } in vectors("packets.txt") {
        assert_eq!(describe(Packet::parse(&bytes)), want, "{name}");
    }
}

/// What parses is emitted as the same bytes, except for fields that receivers ignore.
#[test]
fn packets__emit() {
    for Vector { name, bytes, .. } in vectors("packets.txt") {
        let Ok(packet) = Packet::parse(&bytes) else {
            continue;
        };
        let mut buffer = vec![0; packet.wire_len()];
        packet.emit(&mut buffer).unwrap();
        if name.ends_with("ignored") {
            assert_eq!(Packet::parse(&buffer), Ok(packet), "{name}");
        } else {
            assert_eq!(buffer, bytes, "{name}");
        }
    }
}

#[test]
fn flows__rust() {
    for Vector { name, bytes, want } in vectors("flows.txt") {
        assert_eq!(describe_flows(&bytes), want, "{name}");
    }
}

/// What a stack's bytes say; `None`: they are refused.
fn describe_layer(kind: &str, bytes: &[u8]) -> Option<String> {
    let (said, rest) = match kind {
        "message" => {
            let said = match Message::parse(bytes)? {
                Message::Packet(packet) => format!("packet {}", hex(packet)),
                Message::Setup {
                    token,
                    rate,
                    layers,
                } => format!("setup token={token:016x} rate={rate} layers={layers}"),
                Message::Accept => "accept".to_owned(),
                Message::Refuse(why) => format!("refuse {why}"),
            };
            return Some(said);
        }
        "ordering" => {
            let (Ordering { seq }, rest) = Ordering::parse(bytes)?;
            (format!("seq={seq}"), rest)
        }
        "flow-control" => {
            let (header, rest) = FlowControl::parse(bytes)?;
            let said = match header {
                FlowControl::Data => "data".to_owned(),
                FlowControl::Credit(limit) => format!("credit {limit}"),
            };
            (said, rest)
        }
        "nack" => {
            let (header, rest) = Nack::parse(bytes)?;
            let said = match header {
                Nack::Data { seq, xid } => format!("data seq={seq} xid={xid}"),
                Nack::Probe { next, xid } => format!("probe next={next} xid={xid}"),
                Nack::Report(r) => {
                    let runs = r.missing.iter().map(|(a, m)| format!(" {a}+{m}"));
                    let of = (r.cum, r.end, r.echo, r.held, r.dups);
                    let (cum, end, echo, held, dups) = of;
                    format!("report cum={cum} end={end} echo={echo} held={held} dups={dups}")
                        + &runs.collect::<String>()
                }
            };
            (said, rest)
        }
        "fec" => {
            let (header, rest) = Fec::parse(bytes)?;
            let said = match header {
                Fec::Data { block, index } => format!("data block={block} index={index}"),
                Fec::Parity {
                    block,
                    count,
                    lengths,
                } => format!("parity block={block} count={count} lengths={lengths}"),
            };
            (said, rest)
        }
        "compression" => {
            let (header, rest) = Compression::parse(bytes)?;
            let said = match header {
                Compression::Stored => "stored",
                Compression::Lz4 => "lz4",
            };
            (said.to_owned(), rest)
        }
        other => panic!("there is no layer {other}"),
    };
    match rest.is_empty() {
        true => Some(said),
        false => Some(format!("{said} packet {}", hex(rest))),
    }
}

#[test]
fn vectors__layers() {
    for Vector { name, bytes, want } in vectors("layers.txt") {
        let kind = name.split('_').next().unwrap();
        let said = describe_layer(kind, &bytes);
        assert_eq!(said.as_deref().unwrap_or("refused"), want, "{name}");
    }
}

#[test]
fn vectors__c() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vectors");
    let status = Command::new("clang-19")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"])
        .arg(folder().join("../../../bpf/include"))
        .arg(format!("-DMIN_PAYLOAD={MIN_PAYLOAD}"))
        .arg("-o")
        .arg(&program)
        .arg(folder().join("vectors.c"))
        .status()
        .expect("clang-19 runs: make setup");
    assert!(status.success(), "clang-19 refuses tests/vectors.c");
    let list = vectors("packets.txt");
    let input: String = list
        .iter()
        .map(|vector| hex(&vector.bytes) + "\n")
        .collect();
    let mut child = Command::new(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Larger than a pipe holds in both directions: the writer must not wait for the reader.
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.lines().count(), list.len());
    for (Vector { name, want, .. }, line) in list.iter().zip(output.lines()) {
        assert_eq!(line, want, "{name}");
    }
}
