//! An echo with tokio: `async_echo serve COUNT` at one host serves so many sessions, `async_echo
//! ADDRESS SESSIONS BYTES` at the other opens some at once, sends and receives at the same time, and
//! compares. Port 9255; the daemon's socket is `$VTL_SOCKET`.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, split},
    task::JoinSet,
    time::timeout,
};
use vtl::{
    Requirements,
    control::socket_path,
    tokio::{Listener, Socket},
};

const PORT: u16 = 9255;

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", count] => runtime.block_on(serve(count.parse()?)),
        [address, sessions, bytes] => {
            let to = SocketAddr::new(address.parse()?, PORT);
            runtime.block_on(connect(to, sessions.parse()?, bytes.parse()?))
        }
        _ => Err("usage: async_echo serve COUNT | async_echo ADDRESS SESSIONS BYTES".into()),
    }
}

async fn serve(count: usize) -> Outcome {
    let mut listener = Listener::bind(PORT, &socket_path(None))?;
    println!("ready");
    let mut sessions = JoinSet::new();
    for _ in 0..count {
        let mut session = listener.accept().await?;
        sessions.spawn(async move {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let n = session.read(&mut buffer).await?;
                if n == 0 {
                    return Ok(());
                }
                session.write_all(&buffer[..n]).await?;
            }
        });
    }
    finish(sessions).await
}

async fn connect(to: SocketAddr, sessions: usize, bytes: usize) -> Outcome {
    let mut clients = JoinSet::new();
    for _ in 0..sessions {
        clients.spawn(client(to, bytes));
    }
    finish(clients).await
}

async fn client(to: SocketAddr, bytes: usize) -> Outcome {
    let session = Socket::connect(to, &Requirements::STREAM, &socket_path(None)).await?;
    let (mut reader, mut writer) = split(session);
    let data: Vec<u8> = (0..bytes).map(|i| (i * 31 + i / 251) as u8).collect();
    let sent = data.clone();
    let sender = tokio::spawn(async move {
        writer.write_all(&sent).await?;
        Ok::<_, std::io::Error>(writer)
    });
    let mut got = vec![0; bytes];
    let mut at = 0;
    while at < bytes {
        // Whoever gives up waiting loses nothing.
        let read = timeout(Duration::from_millis(2), reader.read(&mut got[at..]));
        if let Ok(read) = read.await {
            at += match read? {
                0 => return Err("the session ended too early".into()),
                n => n,
            };
        }
    }
    if got != data {
        return Err("the answer is not what was sent".into());
    }
    let writer = sender.await??;
    Ok(reader.unsplit(writer).close().await?)
}

async fn finish(mut tasks: JoinSet<Outcome>) -> Outcome {
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}
