//! The flows' TCP connections, and the applications.

use super::*;

impl Simulation {
    /// Bytes that an application has written and its host has not sent yet.
    pub(super) fn readable(&self, index: usize, host: usize) -> u64 {
        let flow = &self.flows[index];
        let sent = self.hosts[host]
            .flow(flow.id(host))
            .map_or(0, |f| f.send.next_offset());
        flow.directions[host].written - sent
    }

    pub(super) fn new_bytes(&self, index: usize, host: usize, offset: u64, len: u64) -> Bytes {
        let number = self.flows[index].number;
        (offset..offset + len)
            .map(|at| pattern(number, host, at))
            .collect()
    }

    pub(super) fn tcp_write(&mut self, index: usize, host: usize) {
        let id = self.flows[index].id(host);
        loop {
            let room = SOCKET - self.flows[index].directions[host].pipe_bytes;
            let readable = self.readable(index, host);
            let Some(flow) = self.hosts[host].flow_mut(id) else {
                return;
            };
            let bytes = match flow.send.next(Path::Tcp, room.min(8000)) {
                None => break,
                Some(Next::Again(chunk)) => {
                    flow.send.sent_again(chunk.bytes.len());
                    chunk.bytes
                }
                Some(Next::New { offset, max }) => {
                    let len = max.min(readable);
                    if len == 0 {
                        break;
                    }
                    let bytes = self.new_bytes(index, host, offset, len);
                    let flow = self.hosts[host].flow_mut(id).expect("still there");
                    flow.send.sent_new(bytes.clone(), false);
                    bytes
                }
                Some(Next::Fin) => {
                    flow.send.sent_fin();
                    break;
                }
            };
            let at = self.arrival();
            let direction = &mut self.flows[index].directions[host];
            let at = at.max(direction.pipe.back().map_or(0, |(at, _)| *at));
            direction.pipe_bytes += bytes.len();
            direction.pipe.push_back((at, bytes.to_vec()));
        }
        self.hosts[host].touch(id);
    }

    pub(super) fn tcp_read(&mut self, index: usize, host: usize) {
        let now = self.now;
        let id = self.flows[index].id(host);
        let direction = &mut self.flows[index].directions[1 - host];
        let Some(flow) = self.hosts[host].flow_mut(id) else {
            return;
        };
        let mut arrived = Vec::new();
        while let Some((_, bytes)) = direction.pipe.pop_front_if(|(at, _)| *at <= now) {
            arrived.extend(bytes);
        }
        let mut rest = &arrived[..];
        while !rest.is_empty() && flow.receive.tcp_room() > 0 {
            let len = rest.len().min(flow.receive.tcp_room() as usize);
            assert_eq!(flow.receive.tcp(&rest[..len], false), Ok(()));
            direction.pipe_bytes -= len;
            rest = &rest[len..];
        }
        if !rest.is_empty() {
            direction.pipe.push_front((now, rest.to_vec()));
        }
        let fin = direction.fin.is_some_and(|at| at <= now) && direction.pipe.is_empty();
        if fin && !direction.fin_read {
            direction.fin_read = true;
            assert_eq!(flow.receive.tcp_end(), Ok(()));
        }
        self.hosts[host].touch(id);
    }

    pub(super) fn application(&mut self, index: usize, host: usize) {
        let id = self.flows[index].id(host);
        let (reads, writes) = (
            self.random.below(self.reading[host]),
            self.random.below(40_000),
        );
        let flow = &mut self.flows[index];
        let Some(state) = self.hosts[host].flow_mut(id) else {
            return;
        };
        self.max_held = self.max_held.max(state.receive.held());
        assert!(state.receive.held() <= self.window + INITIAL_CREDIT);
        let direction = &mut flow.directions[1 - host];
        let mut left = reads;
        while let Some((bytes, _)) = state.receive.peek() {
            let len = bytes.len().min(left as usize);
            if len == 0 {
                break;
            }
            assert!(direction.read == state.receive.consumed() || flow.tolerant == [true; 2]);
            direction.read = state.receive.consumed();
            for (at, byte) in (direction.read..).zip(&bytes[..len]) {
                let want = pattern(flow.number, 1 - host, at);
                assert_eq!(
                    *byte, want,
                    "flow {} to host {host}, offset {at}",
                    flow.number
                );
            }
            direction.read += len as u64;
            left -= len as u64;
            state.receive.consume(len);
        }
        if state.receive.is_complete() && !direction.end_read {
            direction.end_read = true;
            self.lost += state.receive.lost();
            assert!(self.has_lost || state.receive.lost() == 0);
            assert!(direction.read == direction.total || state.receive.lost() > 0);
            assert_eq!(
                state.receive.consumed(),
                direction.total,
                "the end of flow {}",
                flow.number
            );
        }
        let direction = &mut flow.directions[host];
        direction.written = direction.total.min(direction.written + writes);
        if direction.written == direction.total
            && state.send.next_offset() == direction.total
            && !state.send.is_finished()
        {
            state.send.finish();
        }
        self.hosts[host].touch(id);
    }

    /// An application at a TCP connection that nobody knows to be a flow's.
    pub(super) fn plain(&mut self, index: usize, host: usize) {
        let (reads, writes) = (self.random.below(40_000), self.random.below(40_000));
        let arrival = self.arrival();
        let now = self.now;
        let flow = &mut self.flows[index];
        let direction = &mut flow.directions[1 - host];
        let mut left = reads as usize;
        while left > 0
            && let Some((at, mut bytes)) = direction.pipe.pop_front_if(|(at, _)| *at <= now)
        {
            let rest = bytes.split_off(left.min(bytes.len()));
            for (at, byte) in (direction.read..).zip(&bytes) {
                let want = pattern(flow.number, 1 - host, at);
                assert_eq!(*byte, want, "plain flow {}, offset {at}", flow.number);
            }
            direction.read += bytes.len() as u64;
            direction.pipe_bytes -= bytes.len();
            left -= bytes.len();
            if !rest.is_empty() {
                direction.pipe.push_front((at, rest));
            }
        }
        if direction.fin.is_some_and(|at| at <= now) && direction.pipe.is_empty() {
            direction.fin_read = true;
            direction.end_read = true;
            let whole = flow.reset_at.is_some() || direction.read == direction.total;
            assert!(whole, "the end of plain flow {}", flow.number);
        }
        let direction = &mut flow.directions[host];
        let len = writes
            .min(direction.total - direction.written)
            .min((SOCKET - direction.pipe_bytes) as u64);
        let arrival = arrival.max(direction.pipe.back().map_or(0, |(at, _)| *at));
        if len > 0 {
            let bytes = (direction.written..direction.written + len)
                .map(|at| pattern(flow.number, host, at))
                .collect();
            direction.pipe.push_back((arrival, bytes));
            direction.pipe_bytes += len as usize;
            direction.written += len;
        }
        if direction.written == direction.total {
            direction.fin.get_or_insert(arrival);
        }
        let over = direction.fin.is_some() && flow.directions[1 - host].fin_read;
        flow.closed[host] = over || flow.reset_at.is_some_and(|at| at <= now);
    }

    /// The TCP connection's end.
    pub(super) fn finish(&mut self, index: usize, host: usize) {
        let now = self.now;
        let id = self.flows[index].id(host);
        let error = self.hosts[host].flow(id).and_then(|f| f.error());
        let reset = self.flows[index].reset_at.is_some_and(|at| at <= now);
        if error.is_some() || reset {
            assert!(
                self.flows[index].reset_at.is_some(),
                "flow {id} ends in {error:?}"
            );
            self.flows[index].error[host] = Some(ResetCode::Reset);
            self.flows[index].closed[host] = true;
            self.hosts[host].close(id);
            return;
        }
        let arrival = self.arrival();
        let flow = &mut self.flows[index];
        let Some(state) = self.hosts[host].flow(id) else {
            return;
        };
        let done = state.send.is_complete();
        let direction = &mut flow.directions[host];
        if done && direction.fin.is_none() {
            direction.fin = Some(arrival.max(direction.pipe.back().map_or(0, |(at, _)| *at)));
        }
        let closing = direction.fin.is_some();
        if closing && state.is_complete() && flow.directions[1 - host].fin_read {
            flow.closed[host] = true;
            self.hosts[host].close(id);
        }
    }
}
